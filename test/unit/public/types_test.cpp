#include "hvd/types.h"

#include <gtest/gtest.h>

namespace hvd {
namespace {

TEST(Types, SizeAndNameOfEveryDataType) {
  const struct {
    DataType dtype;
    int number;
    std::size_t size;
    const char* name;
  } expected[] = {
      {DataType::kUInt8, 0, 1, "uint8"},     {DataType::kInt8, 1, 1, "int8"},
      {DataType::kInt16, 2, 2, "int16"},     {DataType::kInt32, 3, 4, "int32"},
      {DataType::kInt64, 4, 8, "int64"},     {DataType::kBool, 5, 1, "bool"},
      {DataType::kFloat16, 6, 2, "float16"}, {DataType::kBFloat16, 7, 2, "bfloat16"},
      {DataType::kFloat32, 8, 4, "float32"}, {DataType::kFloat64, 9, 8, "float64"},
  };
  EXPECT_EQ(std::size(expected), static_cast<std::size_t>(kDataTypeCount));
  for (const auto& row : expected) {
    EXPECT_EQ(static_cast<int>(row.dtype), row.number);
    EXPECT_EQ(size_of(row.dtype), row.size) << row.name;
    EXPECT_EQ(to_string(row.dtype), row.name);
  }
  EXPECT_EQ(size_of(static_cast<DataType>(kDataTypeCount)), 0u);
  EXPECT_EQ(to_string(static_cast<DataType>(kDataTypeCount)), "unknown");
}

TEST(Types, NamesOfOperations) {
  const char* const ops[] = {"average", "sum",     "min",    "max",     "product",
                             "adasum",  "bit_and", "bit_or", "bit_xor", "average_of_set"};
  ASSERT_EQ(std::size(ops), static_cast<std::size_t>(kReduceOpCount));
  for (int i = 0; i < kReduceOpCount; ++i) {
    EXPECT_EQ(to_string(static_cast<ReduceOp>(i)), ops[i]);
  }
  EXPECT_EQ(to_string(static_cast<ReduceOp>(kReduceOpCount)), "unknown");

  const char* const kinds[] = {
      "allreduce", "allgather", "broadcast",       "reducescatter",      "alltoall", "barrier",
      "join",      "gather",    "add_process_set", "remove_process_set", "reduce",   "scatter"};
  ASSERT_EQ(std::size(kinds), static_cast<std::size_t>(kOpKindCount));
  for (int i = 0; i < kOpKindCount; ++i) {
    EXPECT_EQ(to_string(static_cast<OpKind>(i)), kinds[i]);
  }
  EXPECT_EQ(to_string(static_cast<OpKind>(kOpKindCount)), "unknown");

  EXPECT_EQ(to_string(DeviceType::kCpu), "cpu");
  EXPECT_EQ(to_string(DeviceType::kCuda), "cuda");
}

TEST(Types, Shapes) {
  EXPECT_EQ(shape_to_string({}), "[]");
  EXPECT_EQ(shape_to_string({7}), "[7]");
  EXPECT_EQ(shape_to_string({128, 0, 64}), "[128,0,64]");
}

TEST(Types, BytesOfAView) {
  TensorView view;
  view.count = 5;
  view.dtype = DataType::kFloat64;
  EXPECT_EQ(view.bytes(), 40u);
}

}  // namespace
}  // namespace hvd
