"""The checks by their stable ids: what each is about and why it matters. Their order is the order of findings."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """What a finding is about, and why a reader should care."""

    title: str
    why: str


CHECKS: dict[str, Check] = {
    "run_folder.interrupted": Check(
        "The run came to its end",
        "An interrupted run has no result, and lacks what LoadGen writes at the end; neither is held against it.",
    ),
    "run_folder.simulated": Check(
        "The hardware was there", "What a cost model says of hardware is an estimate, and no result of a benchmark."
    ),
    "log.examined": Check("The run could be examined", "What cannot be read can be neither trusted nor refuted."),
    "log.present": Check(
        "Detail log and summary are there", "The detail log is the result; the summary is for people."
    ),
    "log.abandoned": Check(
        "LoadGen's test came to its end",
        "The run was interrupted and LoadGen ended before its samples were answered; what its files say is no result.",
    ),
    "log.readable": Check(
        "LoadGen's files can be read", "Lines that LoadGen cannot have written were added or damaged."
    ),
    "log.whole": Check("The log runs to its end", "A log that was cut off is no evidence of a completed run."),
    "log.lines": Check(
        "Every kind of line is there",
        "LoadGen writes these lines always; where they are missing, somebody took them out after the run.",
    ),
    "log.extra_lines": Check("No foreign line", "A line that this LoadGen never writes was put in after the run."),
    "log.order": Check("Lines stand in LoadGen's order", "LoadGen writes them in one order; moved lines were edited."),
    "log.repeats": Check(
        "Nothing is said twice",
        "Tools differ in whether they take the first or the last line, so a second one misleads.",
    ),
    "log.spelling": Check(
        "Lines are spelled as LoadGen spells them", "Another spelling shows that another program wrote the line."
    ),
    "log.line_ends": Check(
        "Line ends", "A conversion of all line ends is harmless; lines that end otherwise than the rest were put in."
    ),
    "log.messages": Check(
        "LoadGen's messages are those of such a run", "It says how it starts and how it ends; other words were put in."
    ),
    "log.numbers": Check(
        "Numbers are printed as LoadGen prints them",
        "A rate with more digits than C++ prints was typed or computed later.",
    ),
    "log.times": Check(
        "Time stamps fit together",
        "LoadGen stamps lines that it writes at once with one time; others were put in later.",
    ),
    "log.one_process": Check(
        "One process and one thread wrote the log", "Lines of two are lines of two runs, or were put in later."
    ),
    "log.source_lines": Check(
        "Lines come from where LoadGen's code writes them",
        "Each line names the place in the code that wrote it; another place means another LoadGen or a made-up line.",
    ),
    "build.sources": Check(
        "LoadGen's source files are those of a release",
        "A changed LoadGen can report anything; the log carries the SHA-1 of every source file it was built from.",
    ),
    "build.clean": Check(
        "LoadGen was built unmodified", "Uncommitted changes mean that nobody can rebuild this LoadGen."
    ),
    "build.commit": Check(
        "Version, commit and git log agree", "All are taken from one checkout when LoadGen is built."
    ),
    "build.dates": Check("Dates are in order", "A run cannot precede the program that ran it."),
    "settings.effective": Check(
        "Effective settings follow from the requested ones",
        "LoadGen computes the one from the other; they cannot disagree.",
    ),
    "settings.library_order": Check(
        "The data set was loaded in the order its seed gives",
        "Seed and order follow from each other; if they do not, one of them was changed after the run.",
    ),
    "settings.samples": Check(
        "The number of samples follows from rate and duration",
        "LoadGen sizes an Offline query as 1.1 x target rate x minimum duration; another number contradicts the rate.",
    ),
    "settings.generated": Check(
        "The queries follow from the settings",
        "Count, padding to whole passes and arrival times are computed, not measured.",
    ),
    "result.rate": Check(
        "The rate follows from samples and time",
        "This is the definition of the rate; a figure that breaks it was changed.",
    ),
    "result.tokens": Check(
        "Token rates agree with each other",
        "LoadGen divides one count of tokens by three times; all must lead back to it.",
    ),
    "result.first_tokens": Check(
        "First tokens and the others make up the latencies",
        "A latency is that of its first token and the time of each one after it; one was changed without the others.",
    ),
    "result.latencies": Check(
        "Latencies can belong to one set of samples", "Percentiles rise, and they bound the mean; others were changed."
    ),
    "result.clock": Check(
        "The duration agrees with the log's clocks",
        "Time stamps, power window and date are further clocks; a duration that none of them shows was changed.",
    ),
    "result.error_count": Check("Errors are counted", "The count and the lines are written from one counter."),
    "result.validity": Check(
        "The verdict follows from the figures", "LoadGen says VALID if, and only if, every constraint is met."
    ),
    "result.early_stopping": Check(
        "Early stopping, computed again",
        "Too few queries, or too many slow ones, show no percentile with 99 % confidence.",
    ),
    "summary.readable": Check("The summary is plain text", "LoadGen writes plain ASCII."),
    "summary.fields": Check(
        "The summary says what the detail log says",
        "LoadGen prints both from the same variables; where they differ, one was edited or rebuilt after the run.",
    ),
    "summary.early_stopping": Check(
        "Summary and detail log agree on early stopping", "LoadGen prints both from the same text."
    ),
    "summary.reason": Check(
        "Summary and detail log agree on why the run is INVALID", "LoadGen prints both from the same text."
    ),
    "summary.lines": Check(
        "The summary has every line, in order, and no other", "Lines were taken out, put in, moved or repeated."
    ),
    "summary.counts": Check(
        "Warnings and errors as counted", "Errors do not make a result INVALID, so their count matters."
    ),
    "rules.valid": Check("LoadGen's verdict is VALID", "An INVALID run did not meet its own constraints."),
    "rules.no_errors": Check("The run had no errors", "LoadGen may print VALID although it logged errors."),
    "rules.mode": Check("The run is of the mode its folder names", "A performance run says nothing about accuracy."),
    "rules.seeds": Check(
        "Official seeds", "Each round publishes three seeds, so that nobody can choose easy samples or a kind order."
    ),
    "rules.one_round": Check("One round", "Results of different rounds were made under different rules and seeds."),
    "rules.benchmark": Check("The round has the benchmark", "Each round has its own list, limits and targets."),
    "rules.data_set": Check("The whole data set", "A smaller data set is another benchmark."),
    "rules.sample_count": Check("Enough rows in the library", "A smaller library lets caches answer."),
    "rules.equal_issue": Check("Every row equally often", "Answers differ in length; unequal issue changes the work."),
    "rules.token_latencies": Check("Token latencies are on", "Without them there is no token rate, TTFT or TPOT."),
    "rules.min_duration": Check("The required duration was asked for", "Short runs show peaks, not what is sustained."),
    "rules.ran_long_enough": Check("The run lasted long enough", "The setting is one thing, the run another."),
    "rules.offline_samples": Check("Offline: enough samples", "The query must hold the data set at least once."),
    "rules.whole_passes": Check("Offline: whole passes over the data set", "A part of a pass favours some rows."),
    "rules.scenario": Check("The log is of the scenario its folder names", "Limits are chosen by the folder."),
    "rules.latency_limits": Check("TTFT and TPOT within the limits", "Above them the rate serves nobody in time."),
    "rules.limits_asked": Check("LoadGen was told the limits", "Its verdict is about the limits it was told."),
    "rules.target_latency": Check("Target latency within the limit", "The rules bound it."),
    "rules.early_stopping": Check("Early stopping met", "Otherwise the percentile is not shown."),
    "rules.tokens_per_sample": Check(
        "Tokens per sample as the reference answers",
        "Shorter answers make a higher request rate, longer ones more tokens.",
    ),
    "rules.network": Check("Network division names its SUT so", "The rules of the network division."),
    "accuracy.evidence": Check(
        "Evidence of accuracy",
        "Speed without accuracy can be bought by answering worse; FP4 and FP8 must be shown to hold.",
    ),
    "accuracy.performance_log": Check(
        "The accuracy log beside a performance run",
        "It is an empty list in that mode, which proves nothing either way.",
    ),
    "accuracy.log_readable": Check("The accuracy log can be read", "Foreign lines in it were added or damaged."),
    "accuracy.fields": Check(
        "All answers are logged alike", "LoadGen logs token counts and first tokens of all or of none."
    ),
    "accuracy.records": Check("One answer for each row", "Missing or repeated answers change the score."),
    "accuracy.truncated": Check(
        "The accuracy log is truncated", "A submission holds its ends only, with the hash of all."
    ),
    "accuracy.order": Check(
        "Answers belong to the rows that the seed asks for",
        "Order and seed follow from each other; others were not asked.",
    ),
    "accuracy.token_counts": Check("Token counts are those of the answers", "The token rate is made of these counts."),
    "accuracy.first_token": Check("The first token is that of the answer", "TTFT of another token is TTFT of nothing."),
    "compliance.records": Check(
        "The compliance test logged its samples", "It issues 100 and logs them all; others were left out or put in."
    ),
    "compliance.order": Check(
        "The compliance test asked the rows of its seeds",
        "Which rows are asked follows from the seeds; answers to others were chosen.",
    ),
    "accuracy.scores": Check("Scores reach the targets", "The closed division demands them."),
    "accuracy.scored_log": Check(
        "accuracy.txt scores the log beside it", "Scores of other answers say nothing about these."
    ),
    "accuracy.recomputed": Check(
        "Scores follow from the logged answers",
        "A score decides whether speed was bought by answering worse; it is arithmetic on the answers.",
    ),
    "compliance.recomputed": Check(
        "TEST06 comes out the same", "Its rules are arithmetic on the logged answers, whatever a file says of them."
    ),
    "compliance.end_tokens": Check(
        "TEST06 was verified by the end tokens of the run", "By others it says nothing of the model that answered."
    ),
    "accuracy.hash": Check(
        "accuracy.txt has the hash of the full log", "It ties the truncated log to the evaluated one."
    ),
    "accuracy.tokens_agree": Check(
        "Performance and accuracy runs answer alike", "Shorter answers in the run that is timed are another model's."
    ),
    "nodes.simultaneous": Check(
        "The nodes ran at the same time",
        "A sum of rates is the rate of a rack only if its nodes ran together, sharing power, cooling and network.",
    ),
    "nodes.one_log": Check("One set of logs for the whole system", "MLPerf measures a system of many nodes as one."),
    "nodes.copies": Check("No node's log is a copy", "One measurement counted several times."),
    "nodes.settings": Check("All nodes ran with the same settings", "Different settings are different experiments."),
    "nodes.tokens_per_sample": Check("All nodes answered alike", "Other lengths mean another model or other data."),
    "nodes.spread": Check("How far the nodes differ", "A spread means something only with its definition."),
    "nodes.makespan": Check("The nodes as one run", "Until the last node is done, a rack is not done."),
    "nodes.slow_group": Check("Slow nodes", "They set the time of any job that waits for all."),
    "configuration.rate": Check("The configured rate is the one that ran", "Another configuration made these logs."),
    "configuration.user_conf": Check(
        "LoadGen was asked for what user.conf says",
        "Another configuration made this log, or the file was changed since.",
    ),
    "configuration.parallelism": Check(
        "How the model is spread over GPUs",
        "With one GPU per copy nothing crosses the link between GPUs: the rack is many independent machines.",
    ),
    "system.readable": Check("System descriptions can be read", "They say what was measured."),
    "system.keys": Check("The system description is complete", "MLPerf asks for these facts."),
    "system.values": Check("Status and type are allowed ones", "MLPerf knows no others."),
    "system.name": Check("The system's name", "Blanks around a name break look-ups."),
    "system.part_memory": Check("Memory of the accelerator", "Another memory is another part."),
    "system.part_power": Check("Power of the accelerator", "A power limit decides clocks, and what a watt buys."),
    "system.host_memory": Check("Memory of the host", "Two amounts in one description: one is wrong."),
    "system.software": Check(
        "Software versions agree", "Which software made the number decides whether it can be repeated."
    ),
    "endpoint.readable": Check(
        "Results of MLPerf Endpoints can be read", "They are all there is: no log stands behind."
    ),
    "endpoint.complete": Check("The run ended, with every sample", "What failed is missing from every figure."),
    "endpoint.figures": Check(
        "Counts, rates and distributions follow from each other",
        "The summary is computed from one set of samples; a figure that breaks with the others was changed.",
    ),
    "endpoint.settings": Check("It ran as config.yaml asks", "Another configuration made this result."),
    "submission.layout": Check(
        "What the claimed rules ask for beside the runs",
        "A round's rules are about a whole submission; a run alone meets them in part.",
    ),
    "submission.scenario_name": Check("Scenario folders", "Other names are not read by anybody."),
    "submission.performance": Check("Performance logs are in their place", "Without them there is no result."),
    "submission.accuracy": Check("Accuracy logs are in their place", "Without them there is no valid result."),
    "submission.measurements": Check("The run is described", "How to repeat it."),
    "submission.measurement_keys": Check("The description is complete", "Data types and weights decide comparability."),
    "submission.compliance": Check("Compliance tests passed", "They catch caching and false token counts."),
    "submission.systems": Check("Systems and results fit", "A result without a system says nothing."),
    "submission.owner": Check("Submitter and division are those of the folder", "Division decides the rules."),
    "submission.network": Check("Networked or not", "The network division has rules of its own."),
    "submission.required_scenarios": Check("Required scenarios are there", "One scenario alone can be picked."),
    "submission.code": Check("The code is there", "How to repeat it."),
    "submission.calibration": Check("How quantisation was calibrated is told", "The closed division demands it."),
    "submission.copies": Check("No run stands for two systems", "One measurement was given out for two."),
    "submission.names": Check("No stray files", "The rules of a submission repository."),
    "power.readings": Check("Power readings cover the run", "Only they make watts a measurement."),
    "power.ranging": Check(
        "Ranging and measured power agree", "A run that draws less than its ranging was another run."
    ),
    "power.files": Check("The power measurement is complete", "Its logs tie meter, clock and run together."),
    "power.session": Check(
        "Both ends of the power measurement tell of one session",
        "Client and server write down on their own what they did; files of two sessions are no measurement.",
    ),
    "power.phases": Check(
        "The run lies in the phase that was metered", "Power of another time is the power of another load."
    ),
    "power.hashes": Check(
        "The logs are those that the power session made",
        "Client and server record the SHA-1 of every log; one that was edited afterwards has another.",
    ),
    "power.sources": Check(
        "The power measurement was made by a known release", "A changed one can write any watt into its files."
    ),
    "run_folder.whole": Check("The run folder is whole", "Its rows are the raw data."),
    "run_folder.metrics": Check("Metrics follow from the raw rows", "Every number can be computed again."),
    "run_folder.loadgen": Check("LoadGen's numbers are as logged", "The log is the source."),
    "run_folder.stability": Check("A soak's verdict follows from its time series", "No log of LoadGen's tells it."),
    "run_folder.segments": Check(
        "When a soak began and went on fits its dates and its time series",
        "A pause that is not told makes a soak longer.",
    ),
    "run_folder.replicas": Check(
        "A rack has the replicas of its time series", "Fewer of them would make the rate of each higher."
    ),
    "run_folder.node_rows": Check(
        "A rack's rows are those of its nodes", "Each node's own LoadGen logged its share, and nobody the whole."
    ),
    "run_folder.node_starts": Check(
        "A rack's nodes began when it says", "Rates of runs that took turns do not add up."
    ),
    "run_folder.aggregate": Check(
        "What a rack's nodes did together follows from their rows", "Rates add up only while all of them run."
    ),
    "run_folder.verdict": Check(
        "The verdict follows from log, rows and rules", "A number may be quoted only as its verdict allows."
    ),
    "run_folder.reasons": Check(
        "Every rule that is not met is told, with its numbers", "What was left out, or made small, would be believed."
    ),
    "run_folder.configuration": Check(
        "What ran is what was configured", "A number of one model or precision is not that of another."
    ),
    "run_folder.simulation": Check(
        "Every file says alike what was simulated",
        "A cost model's rate that passes for a measured one is the gravest relabelling there is.",
    ),
    "run_folder.notes": Check(
        "The notes that such a run carries are there", "They say what a reader of the number must know."
    ),
    "run_folder.core_wait": Check(
        "How long the run was kept waiting for a core is told alike",
        "A busy machine makes a slow run; a reader must be told of it, and of no other.",
    ),
    "run_folder.memory": Check(
        "Sizes fit model, precision, machine and time series",
        "They follow from the model's shape, so a model or a format of another name has others.",
    ),
    "run_folder.subject": Check(
        "Data set and machine are those of the rest", "A number of one data set or machine is not that of another."
    ),
    "run_folder.healthy": Check(
        "What the run says against itself", "An audit shows that a run tells the truth, also where that is no good."
    ),
    "run_folder.asked": Check(
        "What LoadGen was asked for is told as it was",
        "Seeds, rate and limits decide what a result can be held against.",
    ),
    "run_folder.times": Check(
        "The folder's dates are those of LoadGen's test", "Simultaneity of nodes is shown by them, or not at all."
    ),
    "run_folder.duration": Check(
        "The rows took as long as LoadGen measured", "Rates of the rows are over this time; two clocks saw it."
    ),
    "run_folder.latencies": Check(
        "Latencies follow from the raw rows", "They decide what is valid, and every one can be computed again."
    ),
    "run_folder.repeats": Check(
        "What repeats say together follows from each",
        "A run that was left out, or another interval, would be believed.",
    ),
    "run_folder.tokens": Check("Our count is LoadGen's count", "Two counters saw the same samples."),
    "tree.unreadable": Check("Folders that cannot be read", "What lies there was not audited."),
    "tree.links": Check("Links", "Links to folders, and out of the audited folder, are not followed."),
}
