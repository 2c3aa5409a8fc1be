#!/usr/bin/env python3
"""Tests of elastic_picture.py: the lines of a job become curves."""

import pathlib
import sys
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import elastic_picture

LINES = [(1.0, "[w1] step 0: 0 -> 4 ranks"), (2.0, "[w1] step 10: loss 2.0000"), (3.0, "killed"),
         (3.5, "[w1] step 15: 4 -> 3 ranks"), (4.0, "hvdrun: worker 2 on vm is lost"), (5.0, "[w1] step 20: loss 1.0000"),
         (6.0, "[w1] step 25: 3 -> 4 ranks"), (7.0, "killed")]


class ElasticPictureTest(unittest.TestCase):
    def test_reads_losses_ranks_and_kills(self):
        losses, sizes, kills = elastic_picture.read(LINES)
        self.assertEqual(losses, [(2.0, 2.0), (5.0, 1.0)])
        self.assertEqual(sizes, [(1.0, 4), (3.5, 3), (6.0, 4)])
        self.assertEqual([seconds for seconds, _ in kills], [3.0, 7.0])

    def test_draws_what_lies_before_the_last_loss(self):
        root = xml.etree.ElementTree.fromstring(elastic_picture.draw(LINES))
        curves = {line.get("stroke"): line.get("points").split() for line in root if line.tag.endswith("polyline")}
        self.assertEqual(len(curves[elastic_picture.BLUE]), 2)
        self.assertEqual(len(curves[elastic_picture.GREEN]), 4)
        dashed = [line for line in root if line.get("stroke") == elastic_picture.RED]
        self.assertEqual(len(dashed), 1)
        for points in curves.values():
            for point in points:
                self.assertLessEqual(float(point.split(",")[0]), elastic_picture.WIDTH)
        self.assertIn("1 kills, 1 changes", "".join(text.text for text in root if text.tag.endswith("text")))

    def test_refuses_a_job_without_losses(self):
        with self.assertRaises(SystemExit):
            elastic_picture.draw(LINES[:1])


if __name__ == "__main__":
    unittest.main()
