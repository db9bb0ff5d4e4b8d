"""Settings of the stages that make tokens of text: shard, tokenizer, encode."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, SerializeAsAny

from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.section import Section, added, execution
from drover.pipeline.config.shipped import FILTERS


class StdlibSource(Section):
    """The `.py` files of this Python's own standard library: 10+ MB of real text without a network."""

    kind: Literal["stdlib"]
    """This Python's own standard library."""
    name: str = "stdlib"
    """Name of the source in folders, tables and mixtures."""
    include_tests: bool = False
    """Take the library's own test suites too (about 2.5 times the text; some Pythons ship without them). A few of
    their files are broken on purpose: allow for them with max_rejected_share 0.01."""


class FilesSource(Section):
    """Files of this machine or objects of a store. Compressed ones (.gz, .zst) are read as what they hold."""

    kind: Literal["files"]
    """Files, or objects."""
    name: str
    """Name of the source in folders, tables and mixtures."""
    paths: list[str] = execution(min_length=1)
    """Files or globs (`**` crosses folders, `~` is your home), or URLs of objects, of a prefix or with wildcards
    (`s3://`, `gs://`, `az://`; keys and address come from the environment). Matches are sorted, so the order never
    depends on the disk. The files' names below their common folder and their content are what counts, not where they
    lie."""
    format: Literal["auto", "txt", "jsonl", "json", "parquet", "csv", "arrow"] = "auto"
    """What the files hold; `auto` goes by the name's ending (before .gz or .zst);
    .md, .rst, .tex, .py and .html are txt. `json` is an array of objects or
    objects one after another; `arrow` an IPC file or stream; `csv` has a header."""
    separator: str | None = Field(None, min_length=1)
    """For txt: the string between two documents (for example "\\n\\n" or "<|endoftext|>"); null: a file is one."""
    text_field: str = "text"
    """Field or column that holds the document's text."""
    id_field: str | None = None
    """Field or column with the document's own id; null: file name and line or record number, from 1."""
    meta_fields: list[str] = []
    """Fields or columns to keep as the document's `meta`."""


class HubSource(Section):
    """A dataset through `datasets.load_dataset`: from the Hugging Face Hub, or a local folder of data files."""

    kind: Literal["hf"]
    """A dataset of the Hugging Face Hub, or a local folder of one."""
    name: str
    """Name of the source in folders, tables and mixtures."""
    dataset: str
    """Hub id (`roneneldan/TinyStories`) or local path."""
    config_name: str | None = None
    """The dataset's configuration, where it has several."""
    split: str = "train"
    """Which split to read."""
    revision: str | None = None
    """Commit or tag on the Hub. Pin it: an unpinned dataset can change between two runs unseen."""
    streaming: bool = execution(True)
    """Read while downloading (no local copy), or download first."""
    text_field: str = "text"
    """Column that holds the document's text."""
    id_field: str | None = None
    """Column with the document's own id; null: split and record number, from 1."""
    meta_fields: list[str] = []
    """Columns to keep as the document's `meta`."""
    limit: PositiveInt | None = None
    """Take only the first so many records; null: all."""


Source = Annotated[StdlibSource | FilesSource | HubSource, Field(discriminator="kind")]
DocumentFilter = Annotated[SerializeAsAny[Kind], PlainValidator(FILTERS.read)]


class NearDuplicates(Section):
    """Documents that are nearly equal, by MinHash signatures: those that share a band with another are alike, and so
    are those that are like a third. Needs the package rensa (`pip install --editable '.[clean]'`)."""

    preset: Literal["fineweb", "olmo3"] = "fineweb"
    """`fineweb`: shingles of 5 words, 14 bands of 8 rows, for a Jaccard similarity of about 0.75. `olmo3`: 26 bands of
    11 rows, for 0.80; Olmo's shingles are of 5 tokens, ours of 5 words."""
    ngram: int | None = Field(None, ge=1)
    """Words of a shingle; null: the preset's. A document with fewer words is like no other."""
    words: Literal["runs", "characters"] = added("runs")
    """What a word is. `runs`: letters and digits in a row. `characters`: the same, but in scripts that are written
    without spaces (Chinese and Japanese characters, Thai, Lao, Khmer, Burmese) each character is one, so that
    near-copies are found there too; for all other text both are the same."""
    bands: int | None = Field(None, ge=1)
    """Bands of a signature, of 8 bytes each on the disk while the stage works; null: the preset's."""
    rows: int | None = Field(None, ge=1)
    """Numbers of a band, which have to agree all; null: the preset's."""
    verify: float | None = Field(None, gt=0, le=1)
    """Drop a document only if the Jaccard similarity of its runs of 3 `words` with those of the one that is kept is at
    least this; null: drop all that are alike but the kept one. Those that stay are in one split, with
    `heldout_rule: hash`."""


class ShardConfig(Section):
    """Stage 1: sources into WebDataset tar shards of documents."""

    sources: list[Source] = Field([{"kind": "stdlib"}], min_length=1, validate_default=True)
    """Where documents come from; each source keeps its name through to the held-out loss."""
    shard_mb: PositiveFloat = 64.0
    """Text per shard in MB (10^6 bytes). A shard is the unit of work of `encode`: aim for many per process."""
    heldout_share: float = Field(0.01, gt=0, lt=1)
    """Share of the corpus that no training step ever sees; `heldout_rule` says of what."""
    heldout_rule: Literal["hash", "tail"] = "hash"
    """What heldout_share is a share of. `hash`: of the documents, each chosen by the hash of its text alone, so that
    equal texts always fall on the same side. `tail`: of the characters of each source, its documents taken in order
    (files by name, then records), after duplicates are dropped: of n characters the first int(n * (1 - share)) are
    trained on, and the document in which the border falls is cut in two there. Take it for one long text."""
    drop_duplicates: bool = True
    """Keep only the first of documents with equal text, over all sources. Without it, `heldout_rule: tail` can hold out
    a text that is also trained on."""
    keep_duplicate: Literal["first", "last"] = added("first")
    """Which of equal documents stays: the `first` in the order of sources, files and records, or the `last`, where
    sources are listed with the oldest crawl first. It also says which of near-duplicates stays."""
    near_duplicates: NearDuplicates | None = added(None)
    """Keep one of documents that are nearly equal, as in {preset: fineweb}; null: only equal ones are dropped. Which
    document is kept instead of each that is dropped, equal ones too, is then named in duplicates/."""
    filters: list[DocumentFilter] = added([])
    """Which documents are kept and how they are changed, in this order, before duplicates are looked for: each item
    has a `kind` (length, repetition, characters, masking, c4, gopher_quality, gopher_repetition, fineweb_quality,
    language, encoding_repair, normalization, decontamination, or my_module:MyFilter for one of your own), a `name` to
    be counted under (null: the kind) and the settings of that kind, as in {kind: length, least_words: 20}.
    docs/data.md has them all."""
    keep_dropped: bool = added(False)
    """Keep the documents that filters dropped, each with the filter's name and the reason, as JSON lines in dropped/,
    and name the document that is kept instead of each duplicate in duplicates/. They are outputs of the stage, so a
    finished one is made again for them."""
    max_document_mb: PositiveFloat = added(128.0)
    """Largest document in MB (10^6 bytes): a line of jsonl, a value of json, parquet or arrow, a field of csv, a text
    in UTF-8. A larger one is rejected by name and never held in memory; what follows it in a json or csv file is lost.
    A txt file without `separator` is one document."""
    dropped_examples: int = added(3, ge=0, le=100)
    """Of the documents that filters drop, show the beginnings of so many for each reason in manifest and report, as the
    filter saw them; 0: none, where they are not to be read there. A stage that has shown another number is refused with
    both, not served; --force makes it again, and the stages made of its shards, which are the same, stay."""
    max_rejected_share: float = execution(0.001, ge=0, le=1)
    """More unreadable documents than this share of all fail the stage, and so does a larger share of files that break
    off (what follows in them is lost uncounted); fewer are counted and named in rejected.jsonl."""


class TokenizerConfig(Section):
    """Stage 2: the vocabulary, trained or taken from a file."""

    kind: Literal["sentencepiece", "bpe", "tiktoken", "huggingface", "byte", "char"] = "sentencepiece"
    """`sentencepiece` is trained unless `path` is given; `bpe` is trained: byte-level BPE with Llama 3's split, written
    as the kind of file that Llama 3 has, which `tiktoken` reads; `tiktoken` and `huggingface` need `path`;
    `byte` (256 bytes) and `char` (the corpus's characters) are for small experiments."""
    path: str | None = execution(None)
    """A ready tokenizer: sentencepiece `.model`, Llama 3 tiktoken `tokenizer.model`, or a Hugging Face
    `tokenizer.json`; or the folder that holds it, or for the last its name on the Hub (owner/name). Its content, not
    its place, is what counts. A `tokenizer_config.json` beside a tokenizer.json says which tokens are BOS and EOS;
    both are then exported as they are, with the chat template."""
    vocab_size: PositiveInt = 32768
    """Ids in all, with the 256 special ids; a multiple of 128. Applies to trained vocabularies only."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """sentencepiece's model type. Unigram encodes faster and trains about 9 times slower. This and the next setting
    mean nothing to `kind: bpe`."""
    character_coverage: float = Field(0.9999, gt=0, le=1)
    """Share of the corpus's characters that get a piece of their own; the rest are spelled in bytes."""
    train_mb: PositiveFloat = 2000.0
    """Text to train on in MB, sampled evenly from the shards. sentencepiece needs about 13 times as much memory. Of a
    corpus more than four times as large only some shards are read, chosen by their hashes, of each source as its share
    is. More than 5,000 to 20,000 MB help no vocabulary."""
    document_characters: PositiveInt | None = added(None)
    """Of each document only so many characters from its beginning on can be in the sample, so that a few very long
    ones do not outweigh all others (10,000 is usual); null: all of it. The sample is then smaller than `train_mb`."""
    check_mb: PositiveFloat = added(64.0)
    """Held-out text in MB that is checked of each source: that it is read back and has equal ids in the exported
    tokenizer. Of more than that, the beginnings of shards that are chosen by their hashes."""


class EncodeConfig(Section):
    """Stage 3: text shards into token shards."""

    copy_to: str | None = execution(None)
    """URL of an object store (s3://bucket/prefix, gs://, az://, file://) that token shards are copied to before the
    stage is done, for `train.tokens_from`. Keys and addresses come from the environment. For a stage that is done
    already: python -m drover.tools.copy_tokens."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Bytes per token on disk; `auto` takes uint16 up to a vocabulary of 65,536."""
    encoder: Literal["auto", "reference", "fastokens"] = execution("auto")
    """Which library makes the ids; they are the same. `reference` is sentencepiece, tiktoken or tokenizers; `fastokens`
    (`pip install --editable '.[fast]'`) is several times faster. `auto` takes it where it is installed and gave the
    reference's ids on held-out documents, odd strings and fuzz; in every shard some documents are encoded by the
    reference again, which takes over where it differs."""
