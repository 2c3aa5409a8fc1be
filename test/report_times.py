#!/usr/bin/env python3
"""Prints the slowest tests of builds that test/run.sh has run, and those over their budget.

Usage: report_times.py BUILD...     BUILD/tests.xml is what `ctest --output-junit` wrote.

A budget is the time that a test may take alone in the dev build, by its label; docs/testing.md has the table. The times here are of tests
that ran side by side, so a test that is named may be within its budget alone: `ctest --test-dir build/dev -R '^NAME$'` tells.
"""
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

# Seconds. The smallest of a test's labels counts, and what is long has none.
BUDGETS = {'unit': 5, 'sim': 20, 'conformance': 20, 'mpi': 20, 'capi': 20, 'model': 20, 'torch': 30, 'launcher': 30, 'bench': 30,
           'gpu': 30, 'start': 40, 'python': 40, 'style': 60, 'fuzz': 40, 'fault': 60, 'install': 120}
SLOWEST = 10


def budget(labels):
    """The budget of a test with these labels, or None: it has none."""
    if 'long' in labels:
        return None
    return min((BUDGETS[label] for label in labels if label in BUDGETS), default=None)


def labels_of(build):
    """{test: its labels} of a build folder."""
    listing = subprocess.run(['ctest', '--test-dir', str(build), '--show-only=json-v1'], capture_output=True, text=True, check=True)
    tests = json.loads(listing.stdout)['tests']
    return {test['name']: next((p['value'] for p in test.get('properties', ()) if p['name'] == 'LABELS'), []) for test in tests}


def times_of(build):
    """[(seconds, test)] of those that ran."""
    return [(float(case.get('time')), case.get('name')) for case in xml.parse(build / 'tests.xml').getroot().iter('testcase')
            if case.get('status') != 'notrun']


def over_budget(times, labels):
    """[(seconds, test, budget)] of the tests that took longer than they may, longest first."""
    found = [(seconds, name, budget(labels.get(name, []))) for seconds, name in times]
    return sorted((entry for entry in found if entry[2] is not None and entry[0] > entry[2]), reverse=True)


def main(builds):
    for build in map(Path, builds):
        times = times_of(build)
        print(f'slowest tests of {build.name} (seconds, side by side):')
        for seconds, name in sorted(times, reverse=True)[:SLOWEST]:
            print(f'  {seconds:7.1f}  {name}')
        if build.name == 'dev':
            for seconds, name, allowed in over_budget(times, labels_of(build)):
                print(f'over its budget of {allowed} s: {name}, {seconds:.1f} s beside others')


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
