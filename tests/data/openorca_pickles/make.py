"""Writes the table of README.md with the pandas that runs it: ``python make.py PROTOCOL``."""

import pathlib
import sys

import numpy
import pandas

ROWS = [
    {
        "id": "cot.10",
        "system_prompt": "Think step by step.",
        "question": "Where is the blue cup?",
        "output": "On the shelf.",
        "input": "[INST] Where is the blue cup? [/INST]",
        "tok_input": [1, 518, 25580, 29962, 29871],
        "tok_output": [1551, 278, 528, 761, 29889],
        "origin": "cot",
        "tok_input_length": 5,
        "tok_output_length": 5,
    },
    {
        "id": "niv.20",
        "system_prompt": None,
        "question": "Übersetze «кот» und 猫",
        "output": "cat",
        "input": "[INST] Übersetze «кот» und 猫 [/INST]",
        "tok_input": [1, 518, 70000, 29871],
        "tok_output": [6635],
        "origin": "niv",
        "tok_input_length": 4,
        "tok_output_length": 1,
    },
    {
        "id": "t0.30",
        "system_prompt": "",
        "question": "Short?",
        "output": "Yes.",
        "input": "[INST] Short? [/INST]",
        "tok_input": [29871],
        "tok_output": [3869, 29889],
        "origin": "t0",
        "tok_input_length": 1,
        "tok_output_length": 2,
    },
]

if __name__ == "__main__":
    protocol = int(sys.argv[1])
    name = "pandas-{}-numpy-{}-protocol-{}.pkl".format(pandas.__version__, numpy.__version__, protocol)  # noqa: UP032
    pandas.DataFrame(ROWS).to_pickle(str(pathlib.Path(__file__).parent / name), protocol=protocol)
