"""Find the configuration that the fitted time model predicts to be the fastest under the memory limits.

The solver tries a range of accumulation steps and batch sizes. It computes the fastest split of each in closed form.

Note [Teams]
~~~~~~~~~~~~
A *team* is the set of devices that get samples. A device without samples needs no copies and no gather, so a smaller
team may be faster. A team is written as the ceilings of devices 1, 2, ..., with 0 for each device that it leaves out.
Identical devices are interchangeable, so only their number matters. For example, devices 1 and 2 are L4s with a ceiling
of 8, and device 3 is a T4 with a ceiling of 4:

    2 L4s, T4     (8, 8, 4)         2 L4s     (8, 8, 0)
    1 L4,  T4     (0, 8, 4)         1 L4      (0, 8, 0)
    T4            (0, 0, 4)         none      (0, 0, 0)

These are 6 teams instead of 2 ** 3. Seven identical devices have 8 teams instead of 128. The fastest split of each team
is solved once. Among teams within `TEAMS_APART` of the fastest, the smallest wins. With more than `MOST_TEAMS` teams,
devices are left out only in the order of their cost per sample, the most expensive first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.split import even_split, micro_batch_sizes, proportional_split
from autosplit.solve.step_time import StepTime
from autosplit.solve.trial import KNEE_SHARE, LEAST_DIFFERENCE, Trial, configuration_of

MOST_STEPS = 64
"""Maximum number of `accumulation_steps` values to try. Each further micro-step costs time and only saves memory."""


SIZES_OF_STEPS = 17
"""Maximum number of batch sizes to try for each number of micro-steps."""

MOST_TEAMS = 9
"""Maximum number of teams to compare in one round of the search."""

TEAMS_APART = 0.015
"""Minimum gain in samples/s, as a fraction, that justifies a larger team.

With 0.01, the worst plan on the machines of ``benchmarks/search.py`` is 5.4% slower than the best plan. With 0.015, it
is 2.6% slower.
"""

_Result = TypeVar("_Result")

WITHIN_REACH = 0.8
"""Minimum predicted samples/s, as a fraction of the best prediction, for a trial with other devices or batch sizes.

The model's error is seldom larger than 20%.
"""

FIRST_WITHIN_REACH = 0.9
"""`WITHIN_REACH` for configurations without samples on device 0, whose predictions are more accurate.

Trials below this fraction would improve no plan on the machines of ``benchmarks/search.py`` by more than 1.2%.
"""

MOST_REFINED = 3
"""Number of best configurations whose samples on device 0 are searched again, including the cost of the gather."""


class Solver:
    """Find the configurations of a search space that the time model predicts to be the fastest.

    Args:
        least_difference: Minimum relevant difference of predicted samples/s, as a fraction. Among configurations that
            differ by less, the solver chooses the simplest (`Space.plainness`).
        most_samples_per_s: Throughput of the data loader. Without an effective batch size, the solver chooses the
            smallest batch that keeps up with the loader.
    """

    def __init__(
        self,
        space: Space,
        step_time: StepTime,
        *,
        least_difference: float = LEAST_DIFFERENCE,
        most_samples_per_s: float = math.inf,
    ) -> None:
        self.space = space
        self.step_time = step_time
        self.least_difference = least_difference
        self.most_samples_per_s = most_samples_per_s
        # Compute splits with the first fit only. Otherwise trials of one configuration could have different splits.
        self._unfitted = step_time
        self._splits: dict[tuple[int, tuple[int, ...]], tuple[int, ...] | None] = {}
        self._rests: dict[Configuration, tuple[int, ...]] = {}
        self._teams: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def refitted(self, trials: Iterable[Trial]) -> Solver:
        """Return a solver whose time model is also fitted to these trials."""
        measured = []
        for trial in trials:
            if trial.samples_per_s is not None:
                splits = self.splits_of(configuration_of(trial), trial.split)
                measured.append((splits, sum(map(sum, splits)) / trial.samples_per_s))
        solver = Solver(
            self.space,
            self.step_time.refitted(measured),
            least_difference=self.least_difference,
            most_samples_per_s=self.most_samples_per_s,
        )
        solver._unfitted, solver._splits, solver._rests = (
            self._unfitted,
            self._splits,
            self._rests,
        )
        return solver

    def split_of(self, configuration: Configuration) -> tuple[int, ...]:
        """Return the fastest split for this batch size and number of samples on device 0."""
        rest = configuration.batch_size - configuration.gpu0_bsz
        ceilings = self._ceilings(configuration.accumulation_steps)
        if not ceilings:
            return (configuration.batch_size,)
        if self.step_time.adds_up:
            # All devices share one CPU, so every split takes equally long. Split evenly, within the ceilings.
            return (configuration.gpu0_bsz, *proportional_split(rest, tuple(max(1, c) for c in ceilings), ceilings))
        if configuration not in self._rests:
            self._rests[configuration] = self._fastest_rest(configuration)
        return (configuration.gpu0_bsz, *self._rests[configuration])

    def _fastest_rest(self, configuration: Configuration) -> tuple[int, ...]:
        share, steps = configuration.gpu0_bsz, configuration.accumulation_steps
        rest = configuration.batch_size - share
        others = self._ceilings(steps)

        def of_team(team: tuple[int, ...]) -> tuple[float, tuple[int, ...]] | None:
            split = self._fastest_split(rest, (0, *team))
            return None if split is None else (1 / self._unfitted.seconds(((share, *split[1:]),) * steps), split[1:])

        found = _best_of(self._teams_of(others), of_team)
        assert found is not None, (configuration, self.space)
        return self._in_order(found, others)

    def _ceilings(self, steps: int) -> tuple[int, ...]:
        return self.space.region_of(steps).replica_ceilings

    def _teams_of(self, ceilings: tuple[int, ...]) -> list[tuple[int, ...]]:
        if ceilings not in self._teams:
            self._teams[ceilings] = self._new_teams(ceilings) if self._unfitted.idle_is_free else [ceilings]
        return self._teams[ceilings]

    def _new_teams(self, ceilings: tuple[int, ...]) -> list[tuple[int, ...]]:
        kinds = self._alike(ceilings)
        counts = list(itertools.product(*(range(len(kind), -1, -1) for kind in kinds)))
        if len(counts) > MOST_TEAMS:
            dear = sorted(range(len(ceilings)), key=lambda other: self._own_cost(other, ceilings[other]), reverse=True)
            return [tuple(0 if i in dear[:out] else c for i, c in enumerate(ceilings)) for out in range(len(dear) + 1)]
        teams = []
        for taken in counts:
            present = {index for kind, count in zip(kinds, taken, strict=True) for index in kind[len(kind) - count :]}
            teams.append(tuple(ceiling if index in present else 0 for index, ceiling in enumerate(ceilings)))
        return teams

    def _alike(self, ceilings: tuple[int, ...]) -> list[list[int]]:
        """Group devices 1, 2, ... that are identical in the model. Index 0 is device 1."""
        time = self._unfitted
        alike: dict[object, list[int]] = {}
        for other, ceiling in enumerate(ceilings, 1):
            kind = ceiling, time.curves[other], time.copies_s[other], time.gather_s_per_sample[other]
            alike.setdefault(kind, []).append(other - 1)
        return list(alike.values())

    def _own_cost(self, other: int, ceiling: int) -> float:
        time, most = self._unfitted, max(1, ceiling)
        own_s = time.curves[other + 1](most) + time.copies_s[other + 1]
        return own_s / most + time.gather_s_per_sample[other + 1]

    def _in_order(self, split: tuple[int, ...], ceilings: tuple[int, ...]) -> tuple[int, ...]:
        """Among identical devices, give the last device the largest number of samples.

        That device computes while the outputs of the others are gathered.
        """
        ordered = list(split)
        for places in self._alike(ceilings):
            for index, samples in zip(places, sorted(split[index] for index in places), strict=True):
                ordered[index] = samples
        return tuple(ordered)

    def splits_of(
        self, configuration: Configuration, split: tuple[int, ...] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the split of each micro-step. A shorter last micro-step is split in the same proportions.

        `split` is the split of a full micro-step, by default `split_of(configuration)`.
        """
        split = split or self.split_of(configuration)
        sizes = micro_batch_sizes(self.space.effective_of(configuration), configuration.batch_size)
        return tuple(split if size == configuration.batch_size else proportional_split(size, split) for size in sizes)

    def samples_per_s(self, configuration: Configuration) -> float:
        """Predict the samples/s of whole optimizer steps."""
        return self.space.effective_of(configuration) / self.step_time.counted_seconds(self._counted(configuration))

    def _counted(self, configuration: Configuration) -> dict[tuple[int, ...], int]:
        split = self.split_of(configuration)
        full, rest = divmod(self.space.effective_of(configuration), configuration.batch_size)
        counted = {split: full} if full else {}
        return {**counted, proportional_split(rest, split): 1} if rest else counted

    def holds(self, configuration: Configuration) -> bool:
        """Return whether the space contains a configuration and no device has too few samples to train on."""
        if not self.space.holds(configuration):
            return False
        least = self.space.region.least_share
        if not self.step_time.idle_is_free:
            # A device without samples runs one sample in a short last micro-step. That is enough if `least_share` is 1.
            splits = [self.split_of(configuration)] if least == 1 else list(self._counted(configuration))
            return min(map(min, splits)) >= least
        return least == 1 or not any(0 < share < least for split in self._counted(configuration) for share in split)

    def fastest_of(self, batch_size: int, steps: int) -> Configuration | None:
        """Return the fastest configuration with this batch size, or None if no split of it fits."""
        shares = self.space.region_of(steps).gpu0_bounds(batch_size)
        if shares is None:
            return None
        ceilings = self._ceilings(steps)
        if self.step_time.adds_up or not ceilings:
            even = even_split(batch_size, 1 + len(ceilings))[0]
            return Configuration(min(max(even, shares[0]), shares[1]), batch_size, steps)

        def of_team(team: tuple[int, ...]) -> tuple[float, Configuration] | None:
            beside = [self._of_team(batch_size, steps, team, with_first=with_first) for with_first in (True, False)]
            rates = {one: self.samples_per_s(one) for one in beside if one is not None}
            best = max(rates, key=lambda one: rates[one], default=None)
            return None if best is None else (rates[best], best)

        found = [self._alone(batch_size, steps), _best_of(self._teams_of(ceilings), of_team)]  # the first wins a tie
        return max((c for c in found if c is not None), key=self.samples_per_s, default=None)

    def _of_team(
        self, batch_size: int, steps: int, team: tuple[int, ...], *, with_first: bool = True
    ) -> Configuration | None:
        shares = self.space.region_of(steps).gpu0_bounds(batch_size)
        assert shares is not None, "`best` requires it"
        if not with_first and (shares[0] or not self._unfitted.host_s):
            return None  # without host time, device 0 slows nothing down
        split = self._fastest_split(batch_size, (shares[1] if with_first else 0, *team))
        found = None if split is None else Configuration(max(split[0], shares[0]), batch_size, steps)
        return found if found is not None and self.holds(found) else None

    def _alone(self, batch_size: int, steps: int) -> Configuration | None:
        found = Configuration(batch_size, batch_size, steps)
        return found if self._unfitted.idle_is_free and self.holds(found) else None

    def _fastest_split(self, batch_size: int, ceilings: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the fastest split within ceilings, or None if they hold too few samples. Cache the result."""
        key = (batch_size, ceilings)
        if key not in self._splits:
            floors = None
            if not self.step_time.idle_is_free:  # each rank needs samples if the batch is large enough
                least = tuple(min(self.space.region.least_share, ceiling) for ceiling in ceilings)
                floors = least if sum(least) <= batch_size else None
            fits = batch_size <= sum(ceilings)
            self._splits[key] = fastest_split(batch_size, self.step_time.curves, ceilings, floors) if fits else None
        return self._splits[key]

    def ranked(self) -> list[Configuration]:
        """Return the best configuration of each batch size that is tried. The first is the best overall."""
        found = [c for c in (self.fastest_of(n, k) for n, k in self._sizes()) if c is not None and self.holds(c)]
        rates = {c: self.samples_per_s(c) for c in found}
        for best in sorted(rates, key=lambda c: -rates[c])[:MOST_REFINED]:
            refined = self._refined(best)
            rates[refined] = self.samples_per_s(refined)
        ranked = sorted(rates, key=lambda c: (-rates[c], c.batch_size))
        if not ranked:
            return []
        if self.space.effective_batch_sizes is None:
            enough = min(KNEE_SHARE * rates[ranked[0]], self.most_samples_per_s)
            first = min((c for c in ranked if rates[c] >= enough), key=lambda c: c.batch_size)
        else:
            near = (c for c in ranked if rates[c] >= (1 - self.least_difference) * rates[ranked[0]])
            first = min(near, key=lambda c: (self.space.plainness(c), -rates[c]))
        return [first, *(c for c in ranked if c != first)]

    def _refined(self, configuration: Configuration) -> Configuration:
        """Move samples to or from device 0 while the predicted samples/s increase.

        The first split ignores the cost of the gather.
        """
        if self.step_time.adds_up:
            return configuration
        rate, distance = self.samples_per_s(configuration), max(1, configuration.batch_size // 8)
        while distance:
            moved = [replace(configuration, gpu0_bsz=configuration.gpu0_bsz + d) for d in (distance, -distance)]
            rates = {c: self.samples_per_s(c) for c in moved if c.gpu0_bsz >= 0 and self.holds(c)}
            better = max(rates, key=lambda c: rates[c], default=configuration)
            if rates.get(better, 0.0) > rate:
                configuration, rate = better, rates[better]
            else:
                distance //= 2
        return configuration

    def first_trials(self) -> list[Configuration]:
        """Return the configurations to try first.

        They are the best configuration, its neighbours, the even split, torch's split, another team and another batch
        size. The last two show errors of the model that trials with one team and one batch size can't show.
        """
        ranked = self.ranked()
        if not ranked:
            return []
        best = ranked[0]
        count = 1 + len(self.space.region.replica_ceilings)
        near = max(1, best.gpu0_bsz // 16)
        even = even_split(best.batch_size, count)[0]
        chunk = -(-best.batch_size // count)  # nn.DataParallel scatters with torch.chunk
        shares = [best.gpu0_bsz, best.gpu0_bsz + near, best.gpu0_bsz - near, even, chunk]
        if self.step_time.adds_up:  # on one CPU, all splits are equally fast
            shares = shares[:1]
        tried = [Configuration(share, best.batch_size, best.accumulation_steps) for share in shares]
        tried += self._another_team(ranked)
        tried += self._without_first(best)
        any_steps = self.space.effective_batch_sizes is None
        others = (c for c in ranked[1:] if any_steps or c.accumulation_steps != best.accumulation_steps)
        tried += itertools.islice(others, 1)
        if self.least_difference > LEAST_DIFFERENCE and not any_steps:
            # Predictions from measured times may be wrong by more than `least_difference`. So also try the simplest.
            within_reach = WITHIN_REACH * max(map(self.samples_per_s, ranked))
            reachable = (c for c in ranked if self.samples_per_s(c) >= within_reach)
            tried.append(min(reachable, key=lambda c: (self.space.plainness(c), -self.samples_per_s(c))))
        return [configuration for configuration in dict.fromkeys(tried) if self.holds(configuration)]

    def _another_team(self, ranked: Sequence[Configuration]) -> list[Configuration]:
        """Return the smallest other team that reaches `WITHIN_REACH` of the best, to measure the cost of a device."""
        if self.step_time.adds_up or not self.step_time.idle_is_free or not self.space.region.replica_ceilings:
            return []

        def team(configuration: Configuration) -> list[bool]:
            return [samples > 0 for samples in self.split_of(configuration)[1:]]

        best = ranked[0]
        within_reach = WITHIN_REACH * self.samples_per_s(best)
        batch_size, steps = best.batch_size, best.accumulation_steps
        teams = self._teams_of(self._ceilings(steps))
        found = [self._of_team(batch_size, steps, teams[i]) for i in spread(0, len(teams) - 1, MOST_TEAMS)]
        others = [c for c in dict.fromkeys((*found, self._alone(batch_size, steps), *ranked)) if c is not None]
        others = [c for c in others if team(c) != team(best) and self.samples_per_s(c) >= within_reach]
        return sorted(others, key=lambda c: (sum(team(c)), -self.samples_per_s(c)))[:1]

    def _without_first(self, best: Configuration) -> list[Configuration]:
        """Return the fastest configuration without samples on device 0, which then only gathers.

        If device 0 computes and gathers at the same time, both take longer. Its compute times do not show this.
        """
        if self.step_time.adds_up or not self._unfitted.host_s or not best.gpu0_bsz:
            return []
        found = []
        for steps in range(best.accumulation_steps, min(best.accumulation_steps + 1, self.space.max_steps) + 1):
            bounds, held = self.space.batch_bounds(steps), sum(self._ceilings(steps))
            if bounds is not None and bounds[0] <= held:
                found.append(Configuration(0, min(bounds[1], held), steps))
        within_reach = FIRST_WITHIN_REACH * self.samples_per_s(best)
        found = [one for one in found if self.holds(one) and self.samples_per_s(one) >= within_reach]
        return sorted(found, key=self.samples_per_s)[-1:]

    def neighbours(self, configuration: Configuration) -> list[Configuration]:
        """Return configurations with slightly more or fewer samples per forward, on device 0, or both."""
        near = {1, max(1, configuration.gpu0_bsz // 16), max(1, configuration.batch_size // 16)}
        steps = configuration.accumulation_steps
        found = []
        for moved in sorted({sign * distance for distance in near for sign in (1, -1)}):
            if not self.step_time.adds_up:
                found.append(replace(configuration, gpu0_bsz=configuration.gpu0_bsz + moved))
                found.append(replace(configuration, batch_size=configuration.batch_size + moved))
            fastest = self.fastest_of(max(1, configuration.batch_size + moved), steps)
            found += [] if fastest is None else [fastest]
        return [c for c in dict.fromkeys(found) if min(c.gpu0_bsz, c.batch_size - 1) >= 0 and self.holds(c)]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Yield pairs (batch size, micro-steps) to try: a geometric grid if there is no effective batch size."""
        if self.space.effective_batch_sizes is None:
            for size in geometric(self.space.region.largest_batch):
                yield size, 1
            return
        fewest, most = self.space.steps_bounds()
        for steps in spread(fewest, most, MOST_STEPS):
            bounds = self.space.batch_bounds(steps)
            for size in () if bounds is None else spread(*bounds, SIZES_OF_STEPS):
                yield size, steps


def _best_of(
    teams: Sequence[tuple[int, ...]], valued: Callable[[tuple[int, ...]], tuple[float, _Result] | None]
) -> _Result | None:
    """Return the result for the smallest team within `TEAMS_APART` of the highest samples/s.

    If there are many teams, the search narrows down to teams around the best.
    """
    found: dict[int, tuple[float, _Result]] = {}
    low, high = 0, len(teams) - 1
    while True:
        looked_at = spread(low, high, MOST_TEAMS)
        for index in looked_at:
            value = None if index in found else valued(teams[index])
            if value is not None:
                found[index] = value
        if not found:
            return None
        best = max(found, key=lambda index: found[index][0])
        if looked_at == list(range(low, high + 1)):
            near = [index for index in found if found[index][0] >= (1 - TEAMS_APART) * found[best][0]]
            return found[min(near, key=lambda index: (sum(map(bool, teams[index])), -found[index][0]))][1]
        low, high = (
            max((i for i in looked_at if i < best), default=low),
            min((i for i in looked_at if i > best), default=high),
        )


def geometric(largest: int) -> list[int]:
    """Return batch sizes from 1 to `largest`, four per doubling."""
    quarters = range(4 * largest.bit_length())  # multiplying by 2 ** 0.25 would round 65536 down
    return sorted({min(largest, int(2 ** (quarter / 4))) for quarter in quarters} | {largest})


def spread(least: int, most: int, count: int = 5) -> list[int]:
    """Return up to `count` evenly spaced sizes from `least` to `most`, including both."""
    return sorted({least + (most - least) * i // (count - 1) for i in range(count)})
