"""Find what an asynchronous matrix product reads while it is written, or where nobody wrote.

A product reads its left operand from registers long after it was issued, until a wait says that it
has finished; some assemblers reuse those registers too early, and the result is wrong now and then.
The scan goes through the listing of `nvdisasm -c` in order, and twice through every loop.
"""

import re
from typing import NamedTuple

INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);"
)
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"\((\.L_\w+)\)")
# What writes no register, or none of the vector registers: stores, barriers, branches, predicates.
NO_RESULT = re.compile(
    r"(ST|RED|BAR|SYNCS|UTMA|WARPGROUP|WARPSYNC|BRA|EXIT|NOP|USETMAXREG|MEMBAR|FENCE|ERRBAR|BSYNC|"
    r"BSSY|DEPBAR|LDGDEPBAR|LDGSTS|CCTL|[IF]SETP|PLOP3|VOTE|U[A-Z]+|R2U?[RP]|ELECT|YIELD|CALL|RET|"
    r"ACQBULK)"
)


class Step(NamedTuple):
    """One instruction, or a label (whose operation is empty)."""

    address: str
    operation: str
    arguments: str


class Product(NamedTuple):
    """A product in flight: the registers of its left operand and of its sum."""

    address: str
    left: frozenset[int]
    total: frozenset[int]


def overwritten_operands(listing: str) -> list[str]:
    """One line for each write to a register that a product in flight reads or sums in."""
    steps = parsed(listing)
    found = scan(steps, 1)
    places = {step.address: i for i, step in enumerate(steps) if not step.operation}
    for i, step in enumerate(steps):
        target = TARGET.search(step.arguments)
        if step.operation == "BRA" and target and places.get(target[1], i) < i:
            found |= scan(steps[places[target[1]] : i], 2)
    return sorted(found)


def parsed(listing: str) -> list[Step]:
    """The instructions and labels of a listing."""
    steps = []
    for line in listing.splitlines():
        if found := INSTRUCTION.search(line):
            steps.append(Step(*found.groups()))
        elif found := LABEL.match(line.strip()):
            steps.append(Step(found[1], "", ""))
    return steps


def scan(steps: list[Step], rounds: int) -> set[str]:
    """Hazards along the steps, gone through so many times."""
    found: set[str] = set()
    groups: list[list[Product]] = []
    group: list[Product] = []
    for step in steps * rounds:
        if step.operation.startswith("HGMMA"):
            group.append(product(step))
            if "gsb0" in step.arguments:
                groups, group = [*groups, group], []
        elif step.operation.startswith("WARPGROUP.DEPBAR"):
            # Waits until so many groups are left; none: until nothing is in flight.
            left = int(re.findall(r"0x([0-9a-f]+)", step.arguments)[-1], 16)
            groups = (
                groups[len(groups) - left :] if 0 < left <= len(groups) else groups if left else []
            )
            group = group if left else []
        else:
            found |= {
                f"{step.address} {step.operation} writes the {what} of HGMMA {x.address}"
                for x in [*(x for y in groups for x in y), *group]
                for what, registers in (("left operand", x.left), ("sum", x.total))
                if written(step) & registers
            }
    return found


def product(step: Step) -> Product:
    """Its registers: N / 2 sums, and four of the left operand unless that lies in shared memory."""
    columns = re.search(r"\d+x(\d+)x\d+", step.operation)
    total, left, *_ = (re.match(r"\s*R(\d+)", x) for x in [*step.arguments.split(","), ""])
    first = int(total[1]) if total else 0
    count = int(columns[1]) // 2 if columns else 0
    return Product(
        step.address,
        frozenset(range(int(left[1]), int(left[1]) + 4)) if left else frozenset(),
        frozenset(range(first, first + count)) if total else frozenset(),
    )


def written(step: Step) -> frozenset[int]:
    """The vector registers that an instruction writes."""
    if not step.operation or NO_RESULT.match(step.operation):
        return frozenset()
    target = re.match(r"\s*R(\d+)", step.arguments)
    if target is None:
        return frozenset()
    return frozenset(range(int(target[1]), int(target[1]) + width(step.operation)))


def width(operation: str) -> int:
    """How many registers a result takes."""
    if operation.startswith("LDSM"):
        return int(operation[-1]) if operation[-1] in "24" else 1
    if ".128" in operation:
        return 4
    wide = ".64" in operation or operation.startswith(("IMAD.WIDE", "DADD", "DMUL", "DFMA"))
    return 2 if wide else 1


def single_buffers(code: str) -> list[str]:
    """Buffers of one tile that products in flight read, and the loop copies into, in Triton's IR.

    A tile that a loop both multiplies and reads into registers gets one buffer, as if it were only
    read: the copy of the next tile does not wait for the product.
    """
    sizes = dict(re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", code))
    views = dict(re.findall(r"(%\S+) = ttg\.memdesc_\w+ (%[\w.]+)", code))

    def buffer(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    products = re.findall(r"warp_group_dot (%[\w.]+), (%[\w.]+), .*isAsync = true", code)
    read = {buffer(x) for pair in products for x in pair}
    return sorted(x for x in read if sizes.get(x) == "1")


# Upper halves of a shared-memory operand's descriptor: strides, and how its rows are interleaved.
DESCRIPTOR = re.compile(
    r"(R\d+), (?:P\w+, )?(R\w+)(?:\.reuse)?, (?:0x40000040|-0x7fffffe0|-0x3ffffff0), RZ"
)


def lost_addresses(listing: str) -> list[str]:
    """One line for each descriptor of a product's operand that comes of a register nobody filled.

    A descriptor is an address of 14 bits plus constants, so its upper half is a constant added to
    zero. Some assemblers forget where they keep the address, of many in few registers, and add the
    constants to whatever is there: the product reads past the end of the shared memory.
    """
    zeros, found = {"RZ"}, []
    for step in parsed(listing):
        added = DESCRIPTOR.match(step.arguments) if step.operation == "IADD3.X" else None
        if added and added[2] not in zeros:
            found.append(f"{step.address} {step.operation} {step.arguments.strip()}")
        for register in written(step):
            zeros.discard(f"R{register}")
        zeros |= zeroed(step)
    return found


def zeroed(step: Step) -> set[str]:
    """The registers that an instruction sets to zero, or to a carry."""
    target, *rest = (x.strip() for x in step.arguments.split(","))
    if step.operation == "CS2R" and rest == ["SRZ"]:
        return {target, f"R{int(target[1:]) + 1}"}
    if step.operation.startswith("CS2R.32") and rest == ["SRZ"]:
        return {target}
    inputs = [x for x in rest if not re.match(r"!?U?P", x)]
    moves = ("MOV", "IMAD.MOV", "IMAD.U32", "IMAD.X", "IADD3.X")
    return {target} if step.operation.startswith(moves) and set(inputs) <= {"RZ"} else set()
