"""How far a run gets at each link of a chain: what stands beside the links' bounds."""

from __future__ import annotations

from dataclasses import dataclass

from kcdsl.diagnostics.model import at
from kcdsl.model.graph import BlockGraph
from kcdsl.route.goals import Goal
from kcdsl_backends.attack.search import attack
from kcdsl_backends.certifier.cache import DAMAGE, ENTRY_SCHEMA, Found, decode, encode, key_of
from kcdsl_backends.certifier.cases import Case
from kcdsl_backends.certifier.cutting import links_of, named, until
from kcdsl_backends.certifier.work import Attained, Station
from kcdsl_backends.threads import threads_for

_CANDIDATES, _ROUNDS = 3, 6
"""Places and steps of the search at one link: less than for a goal, as it refutes nothing."""


@dataclass(frozen=True, slots=True)
class SlackTask:
    """Search for runs of the beginnings of a block, up to each link but the last.

    `names` are those of the links that have a bound.
    """

    goal: Goal
    case: Case
    names: tuple[str, ...]

    def run(self, station: Station) -> tuple[Attained, None]:
        """Return the largest drift that a run has behind each link."""
        with at(self.goal.span):
            case = self.case.on(station.shop.device)
            whole = station.shop.problem(self.goal.block, case.tokens).graph
            links = named(whole, links_of(station.shop.model, whole), self.names)
            beginnings = [until(whole, link.output) for link in links[:-1]]
            return Attained(tuple(_attained(station, self, case, g) for g in beginnings)), None


def _attained(station: Station, task: SlackTask, case: Case, graph: BlockGraph) -> float:
    """Return the largest drift of the output of a graph that was found, by this run or before."""
    key = _key(station, task, case, graph)
    if station.cache is not None:
        found, value = station.cache.read(key)
        if found is Found.HIT:
            try:
                kept = decode(value, ())
            except DAMAGE:
                kept = None
            if isinstance(kept, float) and kept >= 0:
                return kept
    problem = station.shop.problem_of_graph(graph)
    train, infer = problem.simulators()
    with threads_for(problem.size):
        best = attack(
            train,
            infer,
            "inf",
            case.centre,
            case.radius,
            candidates=_CANDIDATES,
            rounds=_ROUNDS,
            restarts=0,
            herds=0,
            seed=case.seed,
        ).value
    if station.cache is not None:
        station.cache.write(key, encode(best))
    return best


def _key(station: Station, task: SlackTask, case: Case, graph: BlockGraph) -> str:
    shop = station.shop
    return key_of(
        {
            "what": "slack",
            "schema": ENTRY_SCHEMA,
            "rules": station.setting.rules,
            "device": shop.device.type,
            "graph": graph.digest,
            "parameters": station.builder(task.goal).digests_of(graph),
            "region": case.digest,
            "numerics": {"train": shop.train.to_json(), "infer": shop.infer.to_json()},
        }
    )
