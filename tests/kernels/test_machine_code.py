"""What is looked for in a listing or in Triton's IR is found, and nothing else."""

import pytest

from kernels.machine_code import lost_addresses, overwritten_operands, single_buffers

LOOP = """
.L_x_1:
        /*0100*/                   MOV R{early}, R9 ;
        /*0110*/                   WARPGROUP.ARRIVE ;
        /*0120*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR4], R24, gsb0 ;
        /*0130*/                   {wait} ;
        /*0140*/                   IMAD.WIDE.U32 R{late}, R8, 0x2, R6 ;
        /*0150*/              @P0  BRA `(.L_x_1) ;
        /*0160*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0170*/                   MOV R12, R3 ;
"""
WAIT, LATER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("early", "late", "wait", "found"),
    [
        (2, 4, LATER, []),
        # In the same round, in the round after, and the second register of a pair.
        (2, 13, LATER, ["0140 IMAD.WIDE.U32 writes the left operand of HGMMA 0120"]),
        (15, 4, LATER, ["0100 MOV writes the left operand of HGMMA 0120"]),
        (2, 11, LATER, ["0140 IMAD.WIDE.U32 writes the left operand of HGMMA 0120"]),
        (2, 55, LATER, ["0140 IMAD.WIDE.U32 writes the sum of HGMMA 0120"]),
        (2, 56, LATER, []),
        # Nothing is in flight after a wait for all.
        (15, 13, WAIT, []),
    ],
)
def test_a_write_to_an_operand_in_flight_is_found(early, late, wait, found) -> None:
    assert overwritten_operands(LOOP.format(early=early, late=late, wait=wait)) == found


DESCRIPTOR = """
        /*0100*/                   {upper} ;
        /*0110*/                   SGXT.U32 R31, R21, 0xe ;
        /*0120*/                   IADD3 R70, P0, R31, 0x20, RZ ;
        /*0130*/                   IADD3.X R76, {zero}, -0x3ffffff0, RZ, P0, !PT ;
        /*0140*/                   R2UR UR10, R70 ;
        /*0150*/                   R2UR UR11, R76 ;
        /*0160*/                   HGMMA.64x16x16.F32.BF16 R80, gdesc[UR8].tnspB, R80, gsb0 ;
"""
ZERO = "CS2R R76, SRZ"


@pytest.mark.parametrize(
    ("upper", "zero", "found"),
    [
        (ZERO, "R76", []),
        (ZERO, "R77.reuse", []),
        ("NOP", "RZ", []),
        ("NOP", "R76", ["0130 IADD3.X R76, R76, -0x3ffffff0, RZ, P0, !PT"]),
        (ZERO, "R1", ["0130 IADD3.X R76, R1, -0x3ffffff0, RZ, P0, !PT"]),
        ("MOV R76, R9", "R76", ["0130 IADD3.X R76, R76, -0x3ffffff0, RZ, P0, !PT"]),
    ],
)
def test_an_operand_whose_address_is_lost_is_found(upper, zero, found) -> None:
    assert lost_addresses(DESCRIPTOR.format(upper=upper, zero=zero)) == found


LOOP_OF_COPIES = """
%b_x = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
%b_k = ttg.local_alloc %k : (tensor<128x64xbf16, #blocked>) -> !ttg.memdesc<128x64xbf16, #shared>
scf.for %i = %c0 to %c2 step %c1 {{
  %tile = ttg.memdesc_index %b_x[%c0] : !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
  %turned = ttg.memdesc_trans %tile : !ttg.memdesc<64x64xbf16, #shared, #smem, mutable>
  %sum = ttng.warp_group_dot %b_k, %turned, %acc {{inputPrecision = 0 : i32, isAsync = true}} :
}}
"""


@pytest.mark.parametrize(("slots", "found"), [(1, ["%b_x"]), (2, [])])
def test_a_tile_that_is_read_and_multiplied_needs_two_buffers(slots, found) -> None:
    assert single_buffers(LOOP_OF_COPIES.format(slots=slots)) == found
