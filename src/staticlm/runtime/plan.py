"""How tokens become calls of fixed-shape methods: planned as a value, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from staticlm.contract.facts import Contract
from staticlm.errors import CapacityError, Code, RunnerError


@dataclass(frozen=True)
class Call:
    """One call of a method.

    Args:
        method: Name of the method.
        start: Absolute position of its first row.
        valid: Rows that carry real tokens, 1 to `step`.
        step: Rows of the method; the rows from `valid` on are padding.
    """

    method: str
    start: int
    valid: int
    step: int

    @property
    def padding(self) -> int:
        """Rows without a real token."""
        return self.step - self.valid

    @property
    def end(self) -> int:
        """Position after the last real token."""
        return self.start + self.valid


@dataclass(frozen=True)
class Plan:
    """The calls that take a number of tokens, in order; each token is in exactly one."""

    start: int
    calls: tuple[Call, ...]

    @property
    def final_position(self) -> int:
        """Position after the last token."""
        return self.calls[-1].end if self.calls else self.start

    @property
    def padding(self) -> int:
        """Rows without a real token in all calls."""
        return sum(call.padding for call in self.calls)


def plan(contract: Contract, position: int, count: int, narrow: bool = True) -> Plan:
    """Plan the calls that take `count` tokens from `position` on.

    Padding rows are written to the caches like real ones, so a call of step N at start p needs
    p + N <= capacity; the next call overwrites them before anything reads them. Among all plans
    this is one with the fewest calls, and of those the least padding. Near the end of the context
    a chunk may therefore be cut short so that the following one still fits, and what no prefill
    step fits goes through smaller steps or decode.

    Args:
        contract: Capacity and steps of the program. Verify methods are not used.
        position: Tokens accepted so far.
        count: Tokens to take.
        narrow: Use the methods that read only the beginning of the caches where they will do.

    Raises:
        CapacityError: `position + count` is beyond the capacity of the program.
        RunnerError: `position` or `count` is negative or not an integer.
    """
    for name, value in (("position", position), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RunnerError(
                Code.TOKEN_INVALID, f"the {name} to plan from", found=value, expected="0 or more"
            )
    capacity = contract.max_context_len
    check_capacity(capacity, position, count)
    if count == 0:
        return Plan(position, ())
    methods = {method.step: method for method in contract.prefills}
    methods[1] = contract.decode
    fitting = [step for step in methods if position + step <= capacity]
    calls = []
    for start, valid, step in _place(_choose(fitting, count), position, count, capacity):
        method = contract.at(methods[step], start) if narrow else methods[step]
        calls.append(Call(method.name, start, valid, step))
    return Plan(position, tuple(calls))


def check_capacity(capacity: int, position: int, count: int) -> None:
    """Refuse a request beyond the artifact's capacity.

    Raises:
        CapacityError: Naming the artifact's limit and the request.
    """
    if position + count > capacity:
        request = f"{position} already taken + {count} more" if position else f"{count}"
        raise CapacityError(
            Code.CAPACITY_EXCEEDED,
            "the request is longer than the context length of this artifact",
            found=f"a request for {position + count} tokens ({request})",
            expected=f"at most {capacity} tokens, fixed when the artifact was exported",
            remedy=(
                f"Shorten the request by {position + count - capacity} tokens, or export the model "
                f"again with a context length of at least {position + count}."
            ),
        )


def _choose(fitting: list[int], count: int) -> list[int]:
    """Steps of the fewest calls that hold `count` tokens, then of the fewest rows; longest first.

    The longest step that fits bounds the number of calls from below, and that many calls always
    fit: an earlier chunk may be cut short (see `_place`). Replacing a longest call by one of step s
    saves `longest - s` rows, so least padding is a knapsack over the surplus.
    """
    longest = max(fitting)
    calls = -(-count // longest)
    if calls == 1:
        return [min(step for step in fitting if step >= count)]
    surplus = calls * longest - count
    shorter = sorted(step for step in fitting if step < longest)
    # fewest[r]: how many replacements save exactly r rows, and the step that the last one brings.
    fewest = {0: (0, 0)}
    for saved in range(1, surplus + 1):
        ways = [(fewest[b][0] + 1, s) for s in shorter if (b := saved - longest + s) in fewest]
        if ways:
            fewest[saved] = min(ways)
    saved = max(r for r, (replaced, _) in fewest.items() if replaced <= calls)
    steps: list[int] = []
    while saved:
        steps.append(fewest[saved][1])
        saved -= longest - steps[-1]
    return sorted(steps + [longest] * (calls - len(steps)), reverse=True)


def _place(
    steps: list[int], position: int, count: int, capacity: int
) -> list[tuple[int, int, int]]:
    """Start, tokens and step of each call: as many as it holds, but every later one still fits."""
    end = position + count
    latest = [0] * len(steps)
    bound = end
    for index in reversed(range(len(steps))):
        bound = min(capacity - steps[index], bound - 1)
        latest[index] = bound
    placed = []
    start = position
    for index, step in enumerate(steps):
        stop = latest[index + 1] if index + 1 < len(steps) else end
        valid = min(step, stop - start)
        placed.append((start, valid, step))
        start += valid
    return placed
