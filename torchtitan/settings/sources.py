"""Keys of a command line, and advice on unknown ones."""

import json
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from torchtitan.settings.plugins import plugin_names
from torchtitan.settings.schema import quoted, shown_name
from torchtitan.settings.synonyms import synonym


def read_command_line(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--section.key value` and `--section.key=value` into key -> text; the last of equal flags counts, of job.plugins all.

    A word without a key is the configuration, as `--job.config_file` names it.

    Returns:
        the texts by dotted key, and one line per argument that is neither such a pair nor the configuration.
    """
    texts: dict[str, str] = {}
    problems, alone = [], []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            alone.append(argument)
            continue
        key, equals, text = argument[2:].partition("=")
        key = "job.config_file" if key == "config" else key.replace("-", "_") if "." in key else key
        if equals or "." not in key and (not arguments or arguments[0].startswith("--")):  # which is no key
            texts[key] = _with_plugins_before(key, text, texts)
        elif arguments and not arguments[0].startswith("--"):
            texts[key] = _with_plugins_before(key, arguments.pop(0), texts)
        else:
            name = shown_name(key)
            advice = synonym(key, "--")
            if not advice or f"--{name}" in advice:
                value = "true" if key.rpartition(".")[2].startswith("enable") else "VALUE"
                advice = f"--{name} {value} or --{name}={value}"
            problems.append(f"command line: --{name}: needs a value ({advice})")
    for word in alone:
        key, equals, text = word.lstrip("-").partition("=")
        given = texts.get("job.config_file")
        if given is None and not equals and not word.startswith("-"):
            texts["job.config_file"] = word
        else:
            advice = f"did you mean --{shown_name(key)}={shown_name(text)}?" if equals else "every setting is --section.key value"
            known = f", and the configuration is {shown_name(given)}" if given else ""
            problems.append(f"command line: {quoted(word)}: argument without a key{known} ({advice})")
    return texts, problems


def _with_plugins_before(key: str, text: str, texts: Mapping[str, str]) -> str:
    """Text of a key; job.plugins, which may be given several times, with the plugins before."""
    if key == "job.plugins" and key in texts:
        for given in (texts[key], text):
            try:
                plugin_names(given)
            except ValueError:  # which is refused where it is read
                return given
        return json.dumps([*plugin_names(texts[key]), *plugin_names(text)])
    return text


def split_keys(words: list[str], section: str = r"[\w-]+") -> tuple[list[str], list[str]]:
    """Split the words of a command's own options from `--section.key VALUE` and `--section.key=VALUE`, of one section or all."""
    own, of_keys, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(rf"--{section}\.", word):
            own.append(word)
            continue
        of_keys.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            of_keys.append(rest.pop(0))
    return own, of_keys


def suggestion(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Advice for an unknown dotted key: the one of a habit, or the nearest of the known ones, in whatever section it is.

    The last part of the name counts most, so that `training.lr` leads to `optimizer.lr`; to another section, and from none, it
    leads only if it is nearly equal. A name without some words of the right one (`batch_size` for
    `local_batch_size`), in its section or in none, is nearly as good as a whole one.
    """
    if of_habit := synonym(key, prefix):
        return of_habit
    if f"{key}.enable" in known:
        return f"did you mean {prefix}{key}.enable true? --help {key} lists its keys"
    section, _, name = key[:100].rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        candidate_section, _, candidate_name = candidate.rpartition(".")
        score = SequenceMatcher(None, name, candidate_name).ratio()
        of_section = candidate.partition(".")[0] == section.partition(".")[0]
        if score < 1 and (of_section or not section) and set(name.split("_")) < set(candidate_name.split("_")):
            score = 0.95
        elif not of_section and score < (0.85 if section else 0.75):
            score = 0.0
        return score, score + 0.2 * SequenceMatcher(None, section, candidate_section).ratio()

    scored = {candidate: likeness(candidate) for candidate in known}
    close = [candidate for candidate, (score, _) in scored.items() if score >= 0.6]
    if not close:
        section = section or key
        of_section = any(candidate.startswith(f"{section}.") for candidate in known)
        return f"--help {section} lists its keys" if of_section else "--help lists the sections"
    return f"did you mean {prefix}{max(close, key=lambda candidate: scored[candidate][1])}?"
