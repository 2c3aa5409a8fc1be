"""The texts that users of hvd may see, read from the sources: errors, warnings, and reports of hvdrun."""

import dataclasses
import re

FOLDERS = ("core", "frameworks", "launcher")
SUFFIXES = {".h", ".cpp", ".cu"}
# Statements whose literals are no messages: assertions of the code about itself, and lines of the log below warnings.
NOT_SHOWN = re.compile(r"HVD_EXPECT|static_assert|HVD_LOG\(k(Debug|Info|Trace)")
# An error or a warning is made in the statement itself; elsewhere a literal of some words is a part of one.
SHOWN = re.compile(r"\bthrow\b|HVD_LOG\(k(Warning|Error|Fatal)|TORCH_WARN|\bStatus\{")
MIN_WORDS_SHOWN, MIN_WORDS_OF_PART = 2, 5
# Files with literals of some words that are no messages: help of options, tables of names, what other programs print.
OTHER_TEXTS = {
    "core/base/config_table.cpp": "descriptions of variables",
    "core/device/cuda/cuda_api.cpp": "names of CUDA's calls",
    "core/public/metrics.cpp": "descriptions of metrics",
    "core/member/coordinator.cpp": "texts of elastic jobs, which no program shows yet",
    "core/member/coordinator_time.cpp": "texts of elastic jobs, which no program shows yet",
    "core/member/deadlines.cpp": "descriptions of deadlines",
    "core/member/member.cpp": "texts of elastic jobs, which no program shows yet",
    "core/member/messages.cpp": "texts of elastic jobs, which no program shows yet",
    "core/observe/timeline_writer.cpp": "JSON",
    "core/transport/ucx/ucx_library.cpp": "names of UCX's functions",
    "frameworks/torch/trainer/training_arguments.cpp": "descriptions of arguments",
    "launcher/command/options.cpp": "help of options",
    "launcher/doctor/collect.cpp": "reasons for unknown facts",
    "launcher/doctor/connections.cpp": "reasons for unknown facts",
    "launcher/doctor/cpu_pairs.cpp": "reasons for unknown facts",
    "launcher/doctor/doctor.cpp": "help of options",
    "launcher/doctor/findings.cpp": "findings, each with its advice; docs/doctor.md lists them",
    "launcher/doctor/measure.cpp": "reasons for unknown facts",
    "launcher/doctor/rank_main.cpp": "usage",
    "launcher/doctor/records.cpp": "reasons for unknown facts",
    "launcher/doctor/records.h": "reasons for unknown facts",
    "launcher/doctor/report.cpp": "lines of the report",
    "launcher/mpirun/mpirun_log.cpp": "lines of mpirun",
    "launcher/system/text.cpp": "lines of backtraces",
}
# Statements that name a thing or a value inside of another text.
PARTS = re.compile(r"^(\*{5} |1, yes, true or on|a file of that size|CUDA…|rank…Options::rank|number of ranks…|MPI was started by|all operations of the batch"
                   r"|all settings are|it…the rest of its group|ranks of a (new set|first dim)|for …step|one on the meta device"
                   r"|one of another layout|, one entry for each rank|the state of an elementwise|hvdrun: rank %d: fork)")
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?P<text>(?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\\n])+\''
                   r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|[;{}]", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Text:
    path: str
    line: int
    text: str  # the constant parts, with an ellipsis for what stands between them
    needs_row: bool  # a message, or a long part of one

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text}"


def words_in(text):
    """Counts words of prose: a path, a variable, a format or a name with underscores does not count."""
    return sum(1 for word in re.split(r"[\s…]+", text) if re.fullmatch(r"[^\w%]*[A-Za-z][a-z]*(?:['-][a-z]+)?\W*", word))


def joined(code, literals):
    """The literals of a statement as one text; neighbours are one literal, as for the compiler."""
    text, previous = "", None
    for start, end, literal in literals:
        text += ("" if previous is None or not code[previous:start].strip() else "…") + literal
        previous = end
    return " ".join(text.split())


def texts_of(path, code):
    """Yields the Text of each statement of a file that has literals."""
    literals, begin = [], 0
    for token in TOKEN.finditer(code):
        if token.group("text") is not None:
            literal = re.sub(r"\\(.)", lambda escape: " " if escape.group(1) in "nt" else escape.group(1), token.group("text"))
            literals.append((token.start(), token.end(), literal))
        elif token.group(0) in ("{", "}", ";"):
            statement = code[begin:token.start()]
            if literals and not NOT_SHOWN.search(statement):
                text = joined(code, literals)
                shown = SHOWN.search(re.sub(r'"(?:\\.|[^"\\\n])*"', '""', statement)) and words_in(text) >= MIN_WORDS_SHOWN
                part = max(words_in(literal) for _, _, literal in literals) >= MIN_WORDS_OF_PART and path not in OTHER_TEXTS
                yield Text(path, code.count("\n", 0, literals[0][0]) + 1, text, bool((shown or part) and not PARTS.search(text)))
            literals, begin = [], token.end()


def all_texts(root):
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES:
                path = file.relative_to(root).as_posix()
                yield from texts_of(path, file.read_text(encoding="utf-8"))
