#!/usr/bin/env python3
"""Draws a run of examples/mnist_elastic: the loss and the number of ranks over time, through deaths and joins.

Usage: elastic_picture.py BUILD FOLDER OUTPUT.svg [--epochs N] [--seed N] [--log FILE] [--from-log FILE]

It starts the example under 'hvdrun -np 4 --min-np 2', kills a rank every few seconds, at times that the seed gives, and
draws the lines that the job prints. FOLDER has the images of Fashion-MNIST. --log also writes the lines with their times;
'--from-log FILE' draws such a file again without a run.
"""

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

RANKS = 4
WIDTH, LEFT, RIGHT = 860, 60, 20
LOSS_TOP, LOSS_HEIGHT, RANKS_TOP, RANKS_HEIGHT = 46, 230, 316, 90
INK, GREY, BLUE, RED, GREEN = "#24292f", "#d0d7de", "#0969da", "#cf222e", "#1a7f37"


def workers_of(job, program):
    """The processes of the example below the job, by /proc."""
    parents, found = {}, []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == str(program).encode() and fields[0] != "Z":
            found.append(int(entry.name))

    def below(process):
        while process > 1:
            if process == job:
                return True
            process = parents.get(process, 0)
        return False

    return [process for process in found if below(process)]


def run(build, folder, epochs, seed):
    """Returns the lines of a run with kills: [(seconds, text)]."""
    program = build.resolve() / "examples" / "mnist_elastic"
    command = [str(build / "launcher" / "hvdrun"), "-np", str(RANKS), "--min-np", "2", "--bind", "none", "--heartbeat", "60", str(program), folder,
               str(epochs)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    begin, lines, chance = time.monotonic(), [], random.Random(seed)
    trains = threading.Event()

    def kill():
        trains.wait()
        while job.poll() is None:
            time.sleep(chance.uniform(2, 5))
            alive = workers_of(job.pid, program)
            # Now and then two ranks at once, but never so many that no rank has the state.
            for victim in chance.sample(alive, chance.choice([1, 1, 2]) if len(alive) == RANKS else min(1, len(alive) // 3)):
                lines.append((time.monotonic() - begin, "killed"))
                os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    for line in job.stdout:
        lines.append((time.monotonic() - begin, line.rstrip("\n")))
        if "loss" in line:
            trains.set()
    if job.wait() != 0:
        sys.exit("\n".join(text for _, text in lines[-20:]) + f"\nelastic_picture: the job has ended with {job.returncode}")
    return lines


def read(lines):
    """Returns (losses, sizes, kills) as lists of (seconds, value)."""
    losses, sizes, kills = [], [], []
    for seconds, text in lines:
        if text == "killed":
            kills.append((seconds, 0))
        if found := re.search(r"step (\d+): loss ([\d.]+)", text):
            losses.append((seconds, float(found[2])))
        if found := re.search(r"step (\d+): (\d+) -> (\d+) ranks", text):
            sizes.append((seconds, int(found[3])))
    return losses, sizes, kills


class Picture:
    """A picture with a horizontal axis of seconds."""

    def __init__(self, first, last, title):
        self.first, self.last, self.parts = first, last, []
        self.text(LEFT, 20, title, "start", 14)

    def x(self, seconds):
        return LEFT + (seconds - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def text(self, x, y, words, anchor, size=11, colour=INK):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
                          f"{words}</text>")

    def line(self, points, colour, width=1.5, dash=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def axis(self, top, height, ticks, y, title):
        for tick in ticks:
            self.line([(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))], GREY, 0.7)
            self.text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end")
        self.text(LEFT, top - 8, title, "start", 12)
        self.line([(LEFT, top), (LEFT, top + height)], INK, 1)

    def svg(self, height):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
                f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def draw(lines):
    """The picture as text of SVG."""
    losses, sizes, kills = read(lines)
    if len(losses) < 2 or not sizes:
        sys.exit("elastic_picture: the job has printed no losses or no ranks")
    first, last = sizes[0][0], losses[-1][0]
    kills = [kill for kill in kills if first <= kill[0] <= last]
    sizes = [size for size in sizes if size[0] <= last]
    picture = Picture(first, last, f"examples/mnist_elastic: {len(kills)} kills, {len(sizes) - 1} changes of the ranks")
    max_loss = max(value for _, value in losses)

    def loss_y(value):
        return LOSS_TOP + LOSS_HEIGHT * (1 - value / max_loss)

    def ranks_y(value):
        return RANKS_TOP + RANKS_HEIGHT * (1 - value / RANKS)

    picture.axis(LOSS_TOP, LOSS_HEIGHT, [i / 2 for i in range(int(max_loss * 2) + 1)], loss_y, "loss of a step, on all ranks")
    picture.axis(RANKS_TOP, RANKS_HEIGHT, range(RANKS + 1), ranks_y, "ranks")
    for seconds, _ in kills:
        picture.line([(picture.x(seconds), LOSS_TOP), (picture.x(seconds), RANKS_TOP + RANKS_HEIGHT)], RED, 0.8, "3 3")
    picture.line([(picture.x(seconds), loss_y(value)) for seconds, value in losses], BLUE)
    steps = []
    for (seconds, value), after in zip(sizes, [*sizes[1:], (last, 0)]):
        steps += [(picture.x(seconds), ranks_y(value)), (picture.x(min(after[0], last)), ranks_y(value))]
    picture.line(steps, GREEN, 2)
    bottom = RANKS_TOP + RANKS_HEIGHT
    for second in range(0, int(last - first) + 1, 5 if last - first < 80 else 20):
        picture.text(picture.x(first + second), bottom + 16, f"{second}", "middle")
    picture.text(WIDTH - RIGHT, bottom + 34, "seconds since the first step; a dashed line is the SIGKILL of a rank", "end")
    return picture.svg(bottom + 46)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("folder")
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=pathlib.Path)
    parser.add_argument("--from-log", type=pathlib.Path)
    options = parser.parse_args()
    if options.from_log:
        split = [line.split(" ", 1) for line in options.from_log.read_text(encoding="utf-8").splitlines()]
        lines = [(float(seconds), text) for seconds, text in split]
    else:
        lines = run(options.build, options.folder, options.epochs, options.seed)
    lines.sort(key=lambda line: line[0])
    if options.log:
        options.log.write_text("".join(f"{seconds:.3f} {text}\n" for seconds, text in lines), encoding="utf-8")
    options.output.write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
