// Includes the header first, which shows that it is complete.
#include "hvd/c/hvd.h"

hvd_status_t start_and_stop() {
  const hvd_options_t options = HVD_OPTIONS_INIT;
  const hvd_submission_t submission = HVD_SUBMISSION_INIT;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_metrics_t metrics = HVD_METRICS_INIT;
  hvd_status_t status = hvd_init(&options);
  if (status == HVD_OK) status = hvd_run(&submission, nullptr);
  if (status == HVD_OK) status = hvd_operation_result(nullptr, &result);
  if (status == HVD_OK) status = hvd_get_metrics(&metrics);
  return status;
}
