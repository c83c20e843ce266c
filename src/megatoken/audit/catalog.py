"""Checks of run folders by their ids: title and reason."""

from __future__ import annotations

from megatoken.audit.finding import check

for _id, _title, _why in (
    (
        "run_folder.interrupted",
        "The run came to its end",
        "An interrupted run has no result, and lacks what LoadGen writes at the end; neither is held against it.",
    ),
    (
        "run_folder.simulated",
        "The hardware was there",
        "What a cost model says of hardware is an estimate, and no result of a benchmark.",
    ),
    (
        "accuracy.recomputed",
        "Scores follow from the logged answers",
        "A score decides whether speed was bought by answering worse; it is arithmetic on the answers.",
    ),
    (
        "compliance.recomputed",
        "TEST06 comes out the same",
        "Its rules are arithmetic on the logged answers, whatever a file says of them.",
    ),
    (
        "compliance.end_tokens",
        "TEST06 was verified by the end tokens of the run",
        "By others it says nothing of the model that answered.",
    ),
    ("run_folder.whole", "The run folder is whole", "Its rows are the raw data."),
    ("run_folder.metrics", "Metrics follow from the raw rows", "Every number can be computed again."),
    ("run_folder.loadgen", "LoadGen's numbers are as logged", "The log is the source."),
    ("run_folder.stability", "A soak's verdict follows from its time series", "No log of LoadGen's tells it."),
    (
        "run_folder.segments",
        "When a soak began and went on fits its dates and its time series",
        "A pause that is not told makes a soak longer.",
    ),
    (
        "run_folder.replicas",
        "A rack has the replicas of its time series",
        "Fewer of them would make the rate of each higher.",
    ),
    (
        "run_folder.node_rows",
        "A rack's rows are those of its nodes",
        "Each node's own LoadGen logged its share, and nobody the whole.",
    ),
    ("run_folder.node_starts", "A rack's nodes began when it says", "Rates of runs that took turns do not add up."),
    (
        "run_folder.aggregate",
        "What a rack's nodes did together follows from their rows",
        "Rates add up only while all of them run.",
    ),
    (
        "run_folder.verdict",
        "The verdict follows from log, rows and rules",
        "A number may be quoted only as its verdict allows.",
    ),
    (
        "run_folder.reasons",
        "Every rule that is not met is told, with its numbers",
        "What was left out, or made small, would be believed.",
    ),
    (
        "run_folder.configuration",
        "What ran is what was configured",
        "A number of one model or precision is not that of another.",
    ),
    (
        "run_folder.simulation",
        "Every file says alike what was simulated",
        "A cost model's rate that passes for a measured one is the gravest relabelling there is.",
    ),
    (
        "run_folder.notes",
        "The notes that such a run carries are there",
        "They say what a reader of the number must know.",
    ),
    (
        "run_folder.core_wait",
        "How long the run was kept waiting for a core is told alike",
        "A busy machine makes a slow run; a reader must be told of it, and of no other.",
    ),
    (
        "run_folder.memory",
        "Sizes fit model, precision, machine and time series",
        "They follow from the model's shape, so a model or a format of another name has others.",
    ),
    (
        "run_folder.subject",
        "Data set and machine are those of the rest",
        "A number of one data set or machine is not that of another.",
    ),
    (
        "run_folder.healthy",
        "What the run says against itself",
        "An audit shows that a run tells the truth, also where that is no good.",
    ),
    (
        "run_folder.asked",
        "What LoadGen was asked for is told as it was",
        "Seeds, rate and limits decide what a result can be held against.",
    ),
    (
        "run_folder.times",
        "The folder's dates are those of LoadGen's test",
        "Simultaneity of nodes is shown by them, or not at all.",
    ),
    (
        "run_folder.duration",
        "The rows took as long as LoadGen measured",
        "Rates of the rows are over this time; two clocks saw it.",
    ),
    (
        "run_folder.latencies",
        "Latencies follow from the raw rows",
        "They decide what is valid, and every one can be computed again.",
    ),
    (
        "run_folder.repeats",
        "What repeats say together follows from each",
        "A run that was left out, or another interval, would be believed.",
    ),
    ("run_folder.tokens", "Our count is LoadGen's count", "Two counters saw the same samples."),
):
    check(_id, _title, _why)(lambda: None)
