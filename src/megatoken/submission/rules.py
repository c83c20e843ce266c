"""The rules of MLCommons' submission checker by the checks that test them, each with its source and its mend.

The ids are those of docs/submission.md. ``5`` is tools/submission/submission_checker.py of mlcommons/inference at tag
v5.1.1, ``6`` the package tools/submission/submission_checker at b66003e1.
"""

from __future__ import annotations

from dataclasses import dataclass

BOTH = frozenset({5, 6})
FIVE = frozenset({5})
SIX = frozenset({6})
NEITHER: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: which versions of MLCommons' checker refuse for it, and whether we do where they do not.

    ``ours``: rules of the benchmark that a version overlooks (docs/submission.md, "Stricter"); in the open division
    only where ``ours_open``.
    """

    id: str
    title: str
    mend: str
    source: str
    closed: frozenset[int]  # versions that refuse in the closed and the network division
    open: frozenset[int]  # versions that refuse in the open division
    ours: bool = False
    ours_open: bool = False

    def by_mlcommons(self, division: str, version: int) -> bool:
        """Whether that version of MLCommons' checker refuses for it."""
        return version in (self.open if division == "open" else self.closed)

    def by_us(self, division: str) -> bool:
        """Whether we do, where it does not."""
        return self.ours_open if division == "open" else self.ours


_REPEAT = "repeat the run with --rules of the round and nothing that cuts it short"
_PERFORMANCE = "5: check_performance_dir; 6: checks/performance_check.py, "
_ACCURACY = "5: check_accuracy_dir; 6: checks/accuracy_check.py, "
_MEASUREMENTS = "5: check_measurement_dir; 6: checks/measurements_checks.py, "
_SYSTEM = "5: check_system_desc_id; 6: checks/system_check.py, "

RULES: dict[str, Rule] = {
    # Performance
    "submission.performance": Rule(
        "P1",
        "Files of the performance run",
        "copy LoadGen's summary and detail log of the run there, and nothing else",
        "5: check_results_dir, REQUIRED_PERF_FILES; 6: checks/performance_check.py, missing_check (detail log only)",
        BOTH,
        BOTH,
        ours=True,
        ours_open=True,
    ),
    "rules.valid": Rule(
        "P2",
        "LoadGen's verdict",
        "repeat the run until LoadGen says VALID",
        _PERFORMANCE + "get_performance_metric_check (accepts INVALID)",
        FIVE,
        FIVE,
        ours=True,
        ours_open=True,
    ),
    "rules.no_errors": Rule(
        "P3",
        "Errors in the performance log",
        "find the cause of LoadGen's error and repeat the run",
        "5: find_error_in_detail_log; 6: checks/performance_check.py, loadgen_errors_check (without its flag: none)",
        FIVE,
        FIVE,
        ours=True,
        ours_open=True,
    ),
    "rules.equal_issue": Rule(
        "P4",
        "Every row equally often",
        "repeat the run with LoadGen's own mlperf.conf, which sets sample_concatenate_permutation",
        _PERFORMANCE + "equal_issue_check (bound to v4.1)",
        FIVE,
        NEITHER,
        ours=True,
    ),
    "rules.sample_count": Rule(
        "P5",
        "Rows in LoadGen's library",
        "repeat the run on the whole data set",
        _PERFORMANCE + "performance_sample_count_check",
        BOTH,
        BOTH,
    ),
    "rules.data_set": Rule(
        "P5",
        "Rows of the data set",
        "repeat the run on MLPerf's data set",
        "none: both look at performance_sample_count only",
        NEITHER,
        NEITHER,
        ours=True,
    ),
    "rules.seeds": Rule(
        "P6",
        "Seeds of the round",
        "repeat the run with --rules of the round that the submission is for",
        _PERFORMANCE + "seeds_check",
        BOTH,
        BOTH,
    ),
    "rules.min_duration": Rule("P7", "Duration asked for", _REPEAT, _PERFORMANCE + "min_duration_check", BOTH, BOTH),
    "rules.ran_long_enough": Rule(
        "P7", "Duration of the run", _REPEAT, "none: both look at the setting only", NEITHER, NEITHER, ours=True
    ),
    "rules.offline_samples": Rule(
        "P8 P9", "Offline: samples asked for", _REPEAT, _PERFORMANCE + "min_query_count_check", BOTH, FIVE
    ),
    "rules.early_stopping": Rule(
        "P10",
        "Early stopping",
        "issue more queries, or lower the rate until fewer are over the limits",
        "5: check_performance_dir (a message); 6: checks/performance_check.py, latency_check",
        SIX,
        SIX,
        ours=True,
        ours_open=True,
    ),
    "rules.target_latency": Rule(
        "P11", "Target latency", "leave target_latency out of user.conf", _PERFORMANCE + "latency_check", BOTH, BOTH
    ),
    "rules.token_latencies": Rule(
        "P12",
        "Token latencies",
        "repeat the run with LoadGen's own mlperf.conf, which sets use_token_latencies",
        "5: extra_check_llm; 6: checks/performance_check.py, llm_check",
        BOTH,
        BOTH,
    ),
    "rules.latency_limits": Rule(
        "P13",
        "TTFT and TPOT",
        "lower the rate: megatoken run --find-rate looks for the highest that keeps them",
        "5: extra_check_llm, by the folder; 6: checks/performance_check.py, llm_check, by the log's scenario",
        BOTH,
        BOTH,
        ours=True,
        ours_open=True,
    ),
    "rules.limits_asked": Rule(
        "P13",
        "Limits that LoadGen was told",
        "repeat the run without limits of its own in user.conf",
        "none: both look at the percentiles only",
        NEITHER,
        NEITHER,
        ours=True,
    ),
    "rules.scenario": Rule(
        "P14",
        "Scenario of log and folder",
        "put the logs into the folder of their own scenario",
        "5: an Interactive folder holds a Server log; 6: checks/performance_check.py, inferred_check",
        SIX,
        SIX,
        ours=True,
        ours_open=True,
    ),
    "check.metric": Rule(
        "P15",
        "The figure that is published",
        "copy LoadGen's detail log again, or repeat the run",
        _PERFORMANCE + "get_performance_metric_check",
        BOTH,
        BOTH,
    ),
    "rules.mode": Rule(
        "P15",
        "Mode of the run",
        "put performance runs into performance/run_1 and accuracy runs into accuracy",
        "none: an accuracy log has no figure to publish; a performance log passes as one of accuracy",
        NEITHER,
        NEITHER,
        ours=True,
    ),
    "submission.network": Rule(
        "P16",
        "Networked or not",
        "leave is_network out of the system's description, or submit to the network division",
        "5: is_system_over_network; 6: checks/performance_check.py, network_check",
        BOTH,
        NEITHER,
    ),
    "rules.network": Rule(
        "P16",
        "Name of a networked SUT",
        "run LoadGen through its QDL with a name that holds 'Network SUT'",
        _PERFORMANCE + "network_check",
        BOTH,
        BOTH,
    ),
    "submission.required_scenarios": Rule(
        "P17",
        "Required scenarios",
        "add runs of the missing scenario",
        "5: check_results_dir; 6: loader.py, check_scenarios",
        BOTH,
        NEITHER,
    ),
    "check.scenario": Rule(
        "P17",
        "Scenarios of the benchmark",
        "remove the folder; the benchmark has no such scenario for this type of system",
        "5: check_results_dir; 6: loader.py, check_scenarios",
        BOTH,
        NEITHER,
    ),
    "check.benchmark": Rule(
        "P17",
        "Benchmark of the round",
        "name the folder as a benchmark of the round; in the open division model_mapping.json may map it to one",
        "5: check_results_dir, config.models; 6: configuration.py, get_mlperf_model",
        BOTH,
        BOTH,
    ),
    # Accuracy
    "submission.accuracy": Rule(
        "A1 A4",
        "Files of the accuracy run",
        "megatoken submission build copies the four files and truncates the log",
        "5: check_results_dir, check_accuracy_dir; 6: checks/accuracy_check.py, accuracy_json_check",
        BOTH,
        BOTH,
    ),
    "check.scores": Rule(
        "A2",
        "Accuracy",
        "evaluate the accuracy run again (megatoken accuracy RUN_FOLDER); if the scores are low, raise the precision",
        _ACCURACY + "accuracy_result_check",
        BOTH,
        NEITHER,
    ),
    "check.score_range": Rule(
        "A2",
        "Scores that can be",
        "evaluate the run again; copy accuracy.txt as it is",
        "none: a score needs only to be high enough",
        NEITHER,
        NEITHER,
        ours=True,
        ours_open=True,
    ),
    "check.hash": Rule(
        "A3",
        "Hash of the full accuracy log",
        "evaluate the accuracy run again (megatoken accuracy RUN_FOLDER), which ends accuracy.txt with it",
        _ACCURACY + "accuracy_result_check",
        BOTH,
        NEITHER,
    ),
    "rules.no_errors of accuracy": Rule(
        "A5",
        "Errors in the accuracy log",
        "find the cause of LoadGen's error and repeat the accuracy run",
        "5: find_error_in_detail_log; 6: checks/accuracy_check.py, loadgen_errors_check",
        BOTH,
        SIX,
    ),
    "rules.data_set of accuracy": Rule(
        "A6",
        "Accuracy over the whole data set",
        "repeat the accuracy run on the whole data set",
        "5: a message; 6: checks/accuracy_check.py, dataset_check",
        SIX,
        SIX,
        ours=True,
    ),
    # Compliance, descriptions, systems, files
    "check.compliance": Rule(
        "C1",
        "Compliance tests",
        "run the test for this scenario and add its run folder to megatoken submission build",
        "5: check_compliance_dir, check_compliance_acc_dir; 6: checks/compliance_check.py",
        BOTH,
        NEITHER,
    ),
    "submission.measurements": Rule(
        "M1",
        "How the run is described",
        "add the file that is named",
        _MEASUREMENTS + "required_files_check",
        BOTH,
        BOTH,
    ),
    "submission.measurement_keys": Rule(
        "M1", "Keys of the description", "fill in the keys", _MEASUREMENTS + "required_fields_check", BOTH, BOTH
    ),
    "check.description_name": Rule(
        "M1",
        "Name of the description",
        "rename it to <system>_<implementation>_<scenario>.json",
        "5: check_measurement_dir",
        FIVE,
        FIVE,
    ),
    "submission.code": Rule(
        "M1",
        "Code",
        "add the folder with the code, or a README.md that says where it is",
        _MEASUREMENTS + "directory_exist_check",
        BOTH,
        BOTH,
    ),
    "check.code": Rule(
        "M1",
        "Code of the benchmark",
        "add the folder with the code, or a README.md that says where it is",
        "5: check_measurement_dir",
        FIVE,
        FIVE,
    ),
    "system.readable": Rule("S1", "System description", "mend the JSON", _SYSTEM + "missing_check", BOTH, BOTH),
    "system.keys": Rule("S1", "Keys of the system", "fill in the keys", _SYSTEM + "required_fields_check", BOTH, BOTH),
    "check.system_values": Rule(
        "S1", "Values of the system", "write them as text", _SYSTEM + "required_fields_check", BOTH, BOTH
    ),
    "system.values": Rule(
        "S1",
        "Status and type of the system",
        "take one of the values that are allowed",
        _SYSTEM + "availability_check, system_type_check",
        BOTH,
        BOTH,
    ),
    "submission.owner": Rule(
        "S2",
        "Submitter and division",
        "write in the system's description what the folders are called",
        _SYSTEM + "submitter_check, division_check",
        BOTH,
        BOTH,
    ),
    "submission.systems": Rule(
        "S2",
        "Systems and results",
        "add the description of each system with results; remove descriptions without any",
        "5: check_results_dir and the check that all systems have results; 6: loader.py, load",
        BOTH,
        BOTH,
    ),
    "submission.calibration": Rule(
        "S3",
        "Calibration document",
        "write in documentation/calibration.md how quantisation was calibrated",
        "5: check that calibration.md exists",
        FIVE,
        NEITHER,
    ),
    "submission.names": Rule(
        "F1",
        "Files and their names",
        "remove or rename what is listed",
        "5: check_results_dir; 6: repository_checks.sh, beside the checker",
        FIVE,
        FIVE,
        ours=True,
        ours_open=True,
    ),
    "check.root": Rule(
        "F1", "Files beside the submissions", "remove what is listed", "5: check_results_dir", FIVE, FIVE
    ),
    "check.stray_system": Rule(
        "F1",
        "Folders among the results that lead to none",
        "remove what is listed",
        "5: check_results_dir, no system_desc; 6: none",
        FIVE,
        FIVE,
        ours=True,
        ours_open=True,
    ),
    "check.strays": Rule(
        "F1",
        "Files and folders among the results that belong to none",
        "remove what is listed",
        "none: both read the files that they look for",
        NEITHER,
        NEITHER,
        ours=True,
        ours_open=True,
    ),
    "tree.unreadable": Rule(
        "F1", "Folders that cannot be read", "grant access to them", "none", NEITHER, NEITHER, ours=True, ours_open=True
    ),
    "power.readings": Rule("W1", "Power readings", "repeat the power run", "5 6: check_power_dir", BOTH, BOTH),
    "power.ranging": Rule("W1", "Ranging and testing", "repeat both power runs", "power_checker.py", BOTH, BOTH),
    "power.files": Rule("W1", "Files of the power run", "add the files", "5: check_power_dir", BOTH, BOTH),
    "power.session": Rule("W1", "Power session", "repeat the power run", "power_checker.py", BOTH, BOTH),
    "power.phases": Rule("W1", "Phases of the power run", "repeat the power run", "power_checker.py", BOTH, BOTH),
    "power.hashes": Rule("W1", "Files of the power session", "copy them again", "power_checker.py", BOTH, BOTH),
    "check.to_fill": Rule(
        "FILL",
        "Fields left to fill in",
        "replace each by what is true of the system or the model",
        "none: to MLCommons' checker any text is a value",
        NEITHER,
        NEITHER,
        ours=True,
        ours_open=True,
    ),
}

# Said by another check of the table, or no matter of the rules.
COVERED = frozenset(
    {
        *("log.present", "accuracy.evidence", "accuracy.truncated", "accuracy.scores", "accuracy.hash"),
        *("submission.compliance", "submission.scenario_name", "rules.one_round", "rules.whole_passes"),
    }
)
