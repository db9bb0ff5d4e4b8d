"""Token shards that training reads from an object store (`train.tokens_from`)."""

from __future__ import annotations

from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import survey
from drover.pipeline.data.stored.opening import GB, reading, used
from drover.pipeline.data.stored.shards import StoredTokens
from drover.pipeline.parallel.ranks import Ranks


def open_store(work: Work, table: ShardTable, ranks: Ranks, url: str) -> StoredTokens:
    """A rank's reader of the shards in a store. Called on all ranks alike. Rank 0 checks that the store holds the
    encode stage's shards.

    Raises:
        UserError: it does not, or it cannot be reached, or a node has no space for its cache; the same on every rank.
    """
    etags = ranks.by_leader(lambda: survey(url, table))
    settings = reading(work.config, table, url)
    tokens = StoredTokens(settings, table, etags,
                          lambda text: say("train", text if ranks.leads else f"rank {ranks.rank}: {text}"))
    problem, how = "", "read in parts, which cannot be verified by hashes"
    if settings.whole:
        try:
            how = f"fetched whole into at most {work.config.train.cache.gb:,g} GB of {tokens.cache.folder}"
        except UserError as error:
            problem = str(error)
    elif work.config.train.cache.read == "auto":
        how += ", as they are more than train.cache.gb"
    if found := dict.fromkeys(problem for problem in ranks.gather(problem) if problem):
        raise UserError("\n".join(found))
    if ranks.leads:
        size = int(used(work.config, table).sum())
        say("train", f"token shards from {url} ({size / GB:,.3f} GB), {how}")
    return tokens
