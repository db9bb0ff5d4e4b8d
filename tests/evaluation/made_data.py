"""Small data sets of the Hub with the columns of those that the suites' tasks read; their texts are made up."""

import random
import zlib

import yaml

from tests.data.source_files import write_jsonl

WORDS = ("sun", "moon", "river", "stone", "green", "quick", "seven", "paper", "walks", "under", "bright", "little")
ITEMS = 8


def text(pick, least=2, most=7):
    return " ".join(pick.choices(WORDS, k=pick.randint(least, most)))


def several(pick, number):
    """So many different texts."""
    return [f"{text(pick, 1, 3)} {number}" for number in range(number)]


def lettered(pick, number):
    return {"text": several(pick, number), "label": list("ABCDE"[:number])}


def of_bigbench(pick):
    choices = several(pick, 4)
    right = pick.randrange(4)
    return {"idx": pick.randrange(99), "inputs": f"{text(pick)}:", "targets": [choices[right]],
            "multiple_choice_targets": choices, "multiple_choice_scores": [int(place == right) for place in range(4)]}


def of_winograd(pick):
    start = f"The {text(pick)} because "
    return {"text": f"{start}it was {text(pick)}.", "pronoun": "it", "pronoun_loc": len(start), "quote": "",
            "quote_loc": 0, "options": ["The cat", "The dog"], "label": pick.randrange(2), "source": ""}


ARC = ("train validation test", lambda pick: {"id": "x", "question": f"What is {text(pick)}?",
                                             "choices": lettered(pick, 4), "answerKey": pick.choice("ABCD")})
MMLU = ("test validation dev", lambda pick: {"question": f"What is {text(pick)}?", "subject": "made",
                                            "choices": several(pick, 4), "answer": pick.randrange(4)})
BIGBENCH = ("default train validation", of_bigbench)
KINDS = {
    "Rowan/hellaswag": {"": ("train validation", lambda pick: {
        "activity_label": "Walking", "ctx_a": f"A person {text(pick)}.", "ctx_b": "then", "ctx": text(pick),
        "endings": several(pick, 4), "label": str(pick.randrange(4))})},
    "allenai/ai2_arc": {"ARC-Easy": ARC, "ARC-Challenge": ARC},
    "aps/super_glue": {
        "boolq": ("train validation", lambda pick: {"question": f"is {text(pick)}", "passage": text(pick, 9, 20),
                                                    "idx": 0, "label": pick.randrange(2)}),
        "copa": ("train validation", lambda pick: {
            "premise": f"The {text(pick)}.", "choice1": f"The {text(pick)}.", "choice2": f"A {text(pick)}.",
            "question": pick.choice(["cause", "effect"]), "idx": 0, "label": pick.randrange(2)})},
    "tau/commonsense_qa": {"": ("train validation", lambda pick: {
        "id": "x", "question": f"Where is {text(pick)}?", "question_concept": "x", "choices": lettered(pick, 5),
        "answerKey": pick.choice("ABCDE")})},
    "baber/piqa": {"": ("train validation", lambda pick: {
        "goal": text(pick), "sol1": text(pick), "sol2": text(pick), "label": pick.randrange(2)})},
    "allenai/openbookqa": {"main": ("train validation test", lambda pick: {
        "id": "x", "question_stem": text(pick), "choices": lettered(pick, 4), "answerKey": pick.choice("ABCD")})},
    "EleutherAI/lambada_openai": {"default": ("test", lambda pick: {"text": text(pick, 9, 14)})},
    "lighteval/winograd_wsc": {"wsc273": ("test", of_winograd)},
    "allenai/winogrande": {"winogrande_xl": ("train validation", lambda pick: {
        "sentence": f"The {text(pick)} so the _ was {text(pick)}.", "option1": "cat", "option2": "stone",
        "answer": pick.choice("12")})},
    "hails/agieval-lsat-ar": {"": ("test", lambda pick: {
        "query": f"{text(pick)}?", "choices": several(pick, 5), "gold": [pick.randrange(5)]})},
    "lighteval/siqa": {"": ("train validation", lambda pick: {
        "context": text(pick), "question": f"Why {text(pick)}?", **dict(zip(
            ("answerA", "answerB", "answerC"), several(pick, 3), strict=True)), "label": pick.choice("123")})},
    "hails/bigbench": {f"{name}_zero_shot": BIGBENCH for name in (
        "qa_wikidata", "dyck_languages", "cs_algorithms", "operators", "repeat_copy_logic",
        "language_identification")},
}
"""By data set and configuration: the splits, and what makes an item."""


def write_dataset(folder, configurations, items=ITEMS):
    """A data set in the Hub's form: a card that names the files, which are JSON lines; its folder."""
    named = []
    for name, (splits, make) in configurations.items():
        files = []
        for split in splits.split():
            pick = random.Random(zlib.crc32(f"{folder.name} {name} {split}".encode()))
            path = f"{name or 'data'}/{split}.jsonl"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / path, [make(pick) for _ in range(items)])
            files.append({"split": split, "path": path})
        named.append({"config_name": name or "default", "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': named})}---\nMade by a test.\n")
    return folder


def push(hub, place, *names, items=ITEMS):
    """Make these data sets below a folder, and put them on the Hub; their commits."""
    return {name: hub.push(f"datasets/{name}", write_dataset(place / name, KINDS[name], items)) for name in names}
