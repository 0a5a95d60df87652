"""Why a vLLM server did not start, from what it has printed.

Its processes fail one after the other, and only the first of them says why: the last lines say "see root cause above".
"""

import re

_PREFIX = re.compile(r"\([^)]*pid=\d+\) ?(?:(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b|\S+: error: |\S+: Error while |.*: not found$")
_KNOWN = (  # the first that is found, and what a user of the command line can do
    (
        r"(Free memory on device|Available memory on node)|out of memory",
        "give the server less memory, such as --vllm.options '{gpu_memory_utilization: 0.3}' (on CPUs too), or fewer "
        "bytes of keys and values, such as --vllm.environment '{VLLM_CPU_KVCACHE_SPACE: \"1\"}' (GiB, CPUs only)",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "give the server more memory, such as --vllm.options '{gpu_memory_utilization: 0.6}', or shorter sequences, "
        "such as --vllm.options '{max_model_len: 2048}'",
    ),
    (
        r"[Aa]ddress already in use",
        "another process has taken its port: start again, which takes a free one, or name one in --vllm.options "
        "'{port: 8001}'",
    ),
    (
        r"No module named '?vllm\b",
        "name the interpreter of an environment that vLLM is installed in, --vllm.python",
    ),
    (r"No module named", "install what is missing beside vLLM, in the environment of --vllm.python"),
    (r"only supported on GPUs with compute capability", "choose --dtype float32, or another GPU"),
    (r"unrecognized arguments", "leave it out of --vllm.options: this vLLM has no such flag"),
    (r"greater than the derived max_model_len", "lower max_model_len in --vllm.options to what the model can do"),
)


def first_error(log: str) -> str | None:
    """The first line of a log that names an error, with the lines that explain it; None if there is none."""
    lines = [_bare(line) for line in log.splitlines()]
    for i, (level, text) in enumerate(lines):
        if _ERROR.match(text) and level in (None, "ERROR", "CRITICAL"):
            explained = [text]
            for _, more in lines[i + 1 : i + 6]:
                if not more.startswith(" ") or more.lstrip().startswith("File "):
                    break
                explained.append(more)
            return "\n".join(explained)
    return None


def advice(error: str) -> str | None:
    """What to do about an error; None if it is none of those that are known."""
    return next((fix for pattern, fix in _KNOWN if re.search(pattern, error)), None)


def _bare(line: str) -> tuple[str | None, str]:
    """The level that a line was logged at, if it was, and the line without the process that printed it."""
    prefix = _PREFIX.match(line)
    return (prefix["level"], line[prefix.end() :]) if prefix else (None, line)
