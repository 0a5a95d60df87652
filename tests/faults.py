"""Every kind of fault that runs are put to, as a table: python tests/faults.py [word ...] [--record
file.md]

Of each kind: how many faults, how each ended, and seconds. A kind of which one ended otherwise has
no row, and the command ends with an error. With ``--record`` the rows of these kinds take the place
of those in the table of the file.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.pop(0)  # of its folders, one called kernels would be taken for a package
sys.path.extend(map(str, (Path(__file__).parent / "support").iterdir()))

import faulty
import forked

HERE = Path(__file__).parent
HEADER = """# Faults that runs were put to

`python tests/faults.py --record benchmarks/results/faults.md` makes this table, or the rows of some kinds (`--help`).
Each fault is injected into a run of its own. "The same bits" are those of the weights of a run that nothing disturbed.
A disk fails, and a rank dies, at each call to the file system of a save; a rank dies in collectives from the first of a
run to the last, and a server fails at each third of its requests. Seconds are those of a busy machine with two cores.

| fault | faults | each ended with | seconds |
|---|--:|---|--:|
"""

SAME, LINE = "the same bits, resumed", "a message that names cause and remedy"
ANY_SIGNAL = "test_any_signal_at_any_moment_leaves_a_run_that_ends_with_the_same_weights"
# Kinds that tests are of, and how each of their cases ends.
TESTS = {
    "SIGINT, SIGTERM, SIGUSR1, SIGKILL at random moments of sft, dpo, grpo, ppo (13 each)": (
        SAME, [f"runs/test_faults.py::{ANY_SIGNAL}[{recipe}-13]" for recipe in ("sft", "dpo", "grpo", "ppo")]),
    "SIGKILL at random moments and in writes; a checkpoint cut (sft, dpo)": (SAME, ["runs/test_resume.py"]),
    "SIGKILL at random moments and in writes of online runs": (
        "the same bits, resumed; each sample once", ["recipes/test_killed_online.py"]),
    "SIGKILL of a rank in a step of 13 recipes, resumed on 1, 2 and 4 ranks, in copies or shards": (
        "weights, metrics and log-probs of one process to 1e-10, resumed", ["runs/test_recipes_resharded.py"]),
    "another number of ranks, or kind of shards": ("the weights of one process to 1e-10", [
        "runs/test_resharding.py::test_a_run_goes_on_in_another_world_to_the_same_weights"]),
    "SIGKILL of a rank that samples, trains or saves": ("the other ends, and names the rank", [
        "runs/test_ranks.py::test_a_rank_that_is_killed_ends_the_other_which_names_it",
        "runs/test_ranks.py::test_a_rank_that_waits_where_no_error_arrives_is_ended"]),
    "a rank whose settings, packages or model files differ, 10 each, in copies and shards": (
        "all end with status 1 in 5 s, name it and train nothing", [
            "runs/test_agreement.py::test_ten_things_that_differ_on_a_rank_are_named_by_all_and_nothing_is_trained"]),
    "a rank that sees an older disk": ("the same bits", [
        "runs/test_agreement.py::test_a_rank_that_sees_an_older_disk_decides_nothing"]),
    "SIGSTOP of a rank in set-up, sampling, reward, forward, save, evaluation": (
        "all end, with status 75 and stacks, and name it; " + SAME, [
            "runs/test_liveness.py::test_a_rank_that_is_stopped_ends_all_which_name_it"]),
    "a rank that holds Python, or stands still": ("all end with status 75 and name it", [
        "runs/test_liveness.py::test_a_rank_that_holds_python_or_stands_still_ends_all"]),
    "SIGKILL of a rank over the first three seconds of sharded ppo and grpo": (
        "the other ends in 15 s, in a line that names it", [
            "runs/test_restarts.py::test_a_rank_that_dies_while_a_run_is_opened_is_survived_for_seconds"]),
    "SIGKILL and SIGSTOP of a rank under torchrun --max-restarts": (
        SAME.replace("resumed", "nobody attending"), [
            "runs/test_restarts.py::"
            "test_torchrun_restarts_ranks_that_are_killed_or_stopped_to_the_same_weights"]),
    "a signal that reaches one rank": ("all stop after the same step; the same bits, resumed", [
        "runs/test_stop.py::test_a_signal_that_reaches_one_rank_stops_all_at_the_same_step"]),
    "a disk that is full where checkpoints are written in the background": (LINE, [
        "runs/test_stop.py::test_a_disk_full_in_the_background_ends_the_run_before_the_next_checkpoint"]),
    "NaN in the gradient of one step": ("the step skipped and counted, the run goes on", [
        "runs/test_outside_faults.py::test_a_step_whose_gradient_is_no_number_is_skipped_and_the_run_goes_on",
        "train/test_step.py::test_a_gradient_that_is_not_finite_is_skipped_and_counted"]),
    "NaN in the loss of a row, or of a sampled completion, on one rank or two": (
        "the step skipped by all ranks, the rows of its micro-batch named", [
            "runs/test_outside_faults.py::test_rows_whose_loss_is_no_number_are_named",
            "runs/test_outside_faults.py::test_rows_of_streamed_parts_are_named",
            "runs/test_outside_faults.py::test_prompts_whose_loss_is_no_number_are_named",
            "runs/test_outside_faults.py::test_the_rank_whose_row_it_is_names_it_and_all_skip_the_step"]),
    "NaN in weights, or in every gradient": ("a message after five steps that names rows", [
        "runs/test_outside_faults.py::test_weights_that_are_no_numbers_end_the_run_in_one_line",
        "train/test_step.py::test_training_stops_when_gradients_stay_infinite"]),
    "NaN in the weights that sample": ("a message that names them; the source lives on", [
        "rollouts/local/test_source.py::test_weights_without_a_finite_log_prob_are_named_and_the_source_lives_on"]),
    "a corrupt row or file of data": ("a message with file, line and fix; or skipped and counted", [
        "../data/test_encode.py::test_a_bad_row_stops_with_file_line_and_fix",
        "../data/test_encode.py::test_skipped_rows_are_counted_by_kind_and_none_is_lost",
        "../data/test_columns.py::test_a_bad_row_says_what_is_wrong",
        "../data/test_records.py::test_a_malformed_json_line_is_named_with_the_fix",
        "../data/test_records.py::test_a_malformed_json_array_is_named_with_the_place",
        "../data/test_records.py::test_a_line_that_is_not_utf8_is_named",
        "../data/test_records.py::test_files_without_records_are_refused",
        "cli/test_cli.py::test_a_bad_row_is_named_and_nothing_is_written"]),
    "a model, teacher or tokenizer that is pickled with code, or brings its own": (LINE + "; no code runs", [
        "runs/test_outside_faults.py::test_a_model_that_brings_code_is_refused_in_one_line_and_none_is_run"]),
    "a reward that raises, exits, hangs, or returns NaN, infinity or no number": (
        "its completion masked, the reason counted", [
        "rewards/test_scoring.py::test_what_is_no_score_is_told_and_counted_and_the_others_are_not_touched",
        "rewards/test_scoring.py::test_a_list_of_the_wrong_length_masks_all_answers_of_the_call",
        "rl/test_unscored.py::test_a_failed_reward_masks_and_one_that_does_not_apply_is_left_out_of_the_sum"]),
    "a reward that fails in all of the first rollout, on one rank or two": (LINE, [
        "rl/test_unscored.py::test_a_reward_that_raises_in_all_calls_of_the_first_rollout_ends_the_run",
        "rl/test_unscored.py::test_every_rank_is_told_why_the_run_ends"]),
    "a reward process that crashes or is out of time": ("its completion masked; the next call works", [
        "rewards/test_isolation.py::test_a_call_out_of_time_is_killed_and_the_next_one_works",
        "rewards/test_isolation.py::test_a_crash_is_an_error_and_the_next_call_works",
        "rewards/test_isolation.py::test_a_judge_masks_what_was_killed"]),
    "a server that answers parts that disagree, or nonsense": (LINE, [
        "rollouts/vllm/test_client.py::TestAnswers::test_an_answer_whose_parts_disagree_is_an_error",
        "rollouts/vllm/test_client.py::TestAnswers::test_what_is_no_answer_is_an_error_that_shows_it"]),
    "a server that is healthy and answers nothing, two ranks": (LINE + ", on all ranks", [
        "runs/test_ranks.py::test_a_healthy_server_that_answers_nothing_ends_the_run_on_all_ranks_by_its_name"]),
    "a trainer that is killed beside the server it started": ("nothing of the server stays", [
        "rollouts/vllm/test_launch.py::test_nothing_of_a_server_outlives_a_trainer_that_is_killed"]),
    "a clock that jumps back and forth by ten years": ("the same bits", [
        "runs/test_outside_faults.py::test_a_clock_that_jumps_back_and_forth_changes_nothing"]),
    "logs, settings, lock or stored log-probs damaged at random (dpo, grpo)": (SAME + ", one warning at most", [
        "runs/test_damaged_logs.py::test_a_run_goes_on_whatever_happened_to_its_other_files",
        "runs/test_damaged_logs.py::test_a_run_goes_on_after_many_more_kinds_of_damage"]),
    "a state of another version or program, with sound checksums": (LINE, [
        "runs/test_checkpoint.py::test_a_state_of_another_version_or_kind_is_told_in_a_line",
        "runs/test_checkpoint.py::test_a_state_that_is_no_file_of_torch_is_told_in_a_line"]),
    "a file system without locks, or whose lock a killed run left": ("one writer", [
        "runs/test_directory.py::test_a_file_system_without_locks_gets_a_file_with_a_heartbeat",
        "runs/test_lock.py"]),
    "a configuration that names the standard library, in seven settings and four commands": (
        LINE + "; no code runs", ["test_own_code.py::test_no_command_runs_anything_of_the_standard_library"]),
    "a chat template that loops or grows without end": (LINE, [
        "../data/test_bounded.py::test_a_hostile_template_is_refused_within_seconds"]),
    "an output whose reader is gone or slow, or whose disk is full": ("a whole run", [
        "runs/test_outside_faults.py::test_an_output_that_takes_nothing_leaves_the_run_to_itself",
        "runs/test_outside_faults.py::test_a_pipe_that_is_full_and_does_not_block_is_waited_for",
        "runs/test_stop.py::test_the_command_exits_with_the_status_of_the_signal"]),
}  # fmt: skip


def of_checkpoints(name):
    """(faults, how they ended)"""
    with tempfile.TemporaryDirectory() as directory:
        begins = Counter(begin for _, begin in faulty.outcomes(name, directory))
    steps = ", ".join(f"step {step}: {count}" for step, count in sorted(begins.items()))
    return begins.total(), f"{SAME} (from {steps})"


def of_servers(name):
    with tempfile.TemporaryDirectory() as directory:
        ((status, printed),) = forked.run_forked(1, "served", name, 3, directory, timeout=3000)
    assert status == 0, printed[-5000:]
    endings = Counter(ended for _, ended in json.loads(printed.splitlines()[-1]))
    return endings.total(), ", ".join(f"{ended}: {count}" for ended, count in endings.items())


def of_tests(name):
    ending, tests = TESTS[name]
    places = [os.path.normpath(HERE / "loops" / test) for test in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        *places,
    ]
    ended = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    passed = re.search(r"^(\d+) passed", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0 and passed, ended.stdout[-5000:]
    return int(passed[1]), ending


KINDS = {
    **dict.fromkeys(faulty.FAULTS, of_checkpoints),
    **dict.fromkeys(
        ("a server that dies and comes back without weights", "a server that is slow",
         "a server that answers status 500", "a server that answers status 429", "a server that answers a page",
         "a server that answers other JSON"),
        of_servers,
    ),
    **dict.fromkeys(TESTS, of_tests),
}  # fmt: skip


def rows_of(path):
    """The rows of the table in this file, by kind."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {
        line.split(" | ")[0].removeprefix("| "): line for line in lines if line.count(" | ") == 3
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="word",
        help="words, of which a kind has one in its name; or all",
    )
    parser.add_argument("--record", type=Path, metavar="file.md")
    options = parser.parse_args()
    rows, failed = rows_of(options.record), []
    for name, measure in KINDS.items():
        if options.kinds and not any(word in name for word in options.kinds):
            continue
        began = time.monotonic()
        try:
            count, ended = measure(name)
        except (AssertionError, TimeoutError) as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
            continue
        rows[name] = f"| {name} | {count} | {ended} | {time.monotonic() - began:.0f} |"
        print(rows[name], flush=True)
        if options.record:
            table = [rows[kind] for kind in KINDS if kind in rows]
            total = sum(int(row.split(" | ")[1]) for row in table)
            options.record.write_text(
                HEADER + "\n".join(table) + f"\n\n{total:,} faults of {len(table)} kinds.\n"
            )
    sys.exit(f"other ends of {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
