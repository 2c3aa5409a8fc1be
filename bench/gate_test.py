"""gate.py without measuring."""

import unittest

import gate


def cores(before, after):
    return {"before": {"round_trip_ns": before}, "after": {"round_trip_ns": after}}


SMALL = {"rows": [{"kind": "allreduce", "bytes": 8, "ratio_to": {"mpi": 2.0}, "loop_ratio_to": {"mpi": 1.5}, "cores": cores(120, 130)}]}
STEPS = {"rows": [{"set": "resnet50", "contenders": {"hvd": {}, "mpi-chunked": {"hvd_added_ratio": 0.4}}}], "cores": cores(120, 500)}
LOOP = "allreduce 8 B, loop, of MPI"
SINGLE = "allreduce 8 B, single, of MPI"
STEP = "step of resnet50, added, of chunked MPI"


class Gate(unittest.TestCase):
    def test_a_state_is_known_if_the_cores_did_not_move(self):
        self.assertEqual(gate.state_of(cores(107, 150)), "near")
        self.assertEqual(gate.state_of(cores(530, 610)), "far")
        self.assertEqual(gate.state_of(cores(255, 310)), "middle")
        self.assertIsNone(gate.state_of(cores(107, 530)))
        self.assertIsNone(gate.state_of(cores(300, 530)))
        self.assertIsNone(gate.state_of(cores(None, None)))

    def test_ratios_are_found_in_the_documents_of_hvd_bench(self):
        self.assertEqual(gate.collect({"small": SMALL, "steps": STEPS}), {LOOP: {"near": 1.5}, SINGLE: {"near": 2.0}, STEP: {"mixed": 0.4}})

    def test_a_ratio_is_judged_by_the_stored_one_of_its_state(self):
        stored = {LOOP: {"near": 1.0, "far": 9.0}, SINGLE: {"near": 1.9}, STEP: {"near": 0.1}}
        verdicts = {row[0]: row[-1] for row in gate.judge(gate.collect({"small": SMALL, "steps": STEPS}), stored)}
        self.assertEqual(verdicts[LOOP], "worse")
        self.assertEqual(verdicts[SINGLE], "same")
        self.assertEqual(verdicts[STEP], "the cores moved")
        self.assertEqual(verdicts["allreduce 16 KiB, loop, of MPI"], "not measured")
        self.assertEqual({row[-1] for row in gate.judge({LOOP: {"far": 1.0}}, stored) if row[0] == LOOP}, {"better"})
        self.assertEqual({row[-1] for row in gate.judge({STEP: {"far": 1.0}}, stored) if row[0] == STEP}, {"nothing stored"})

    def test_only_ratios_of_a_known_state_are_stored(self):
        self.assertEqual(gate.merge({LOOP: {"far": 3.0}}, {LOOP: {"near": 1.23456}, STEP: {"mixed": 0.4}}),
                         {LOOP: {"far": 3.0, "near": 1.235}})


if __name__ == "__main__":
    unittest.main()
