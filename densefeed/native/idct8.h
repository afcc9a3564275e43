/* idct8 of segments.c on 16-bit numbers, two rows of a block per 256 bits: in[k] holds rows 2k and
 * 2k + 1, their first 4 columns in the lower half. pmaddwd exactly replaces three instructions on
 * 32-bit numbers. Included for each length of vectors: VECTOR is their type, IDCT8 begins the
 * definition, and MM(x) is the intrinsic x. */
IDCT8(const VECTOR in[4], int offset, int shift, VECTOR out[8]) {
#define PAIR(a, b) MM(set1_epi32)((int)((uint32_t)(b) << 16 | ((a) & 0xFFFF)))
#define DOT(v, a, b) MM(madd_epi16)(v, PAIR(a, b))
    VECTOR row04 = MM(unpacklo_epi16)(in[0], in[2]), row26 = MM(unpacklo_epi16)(in[1], in[3]);
    VECTOR row71 = MM(unpackhi_epi16)(in[3], in[0]), row53 = MM(unpackhi_epi16)(in[2], in[1]);
    VECTOR sum73 = MM(add_epi16)(in[3], in[1]), sum51 = MM(add_epi16)(in[2], in[0]);
    VECTOR sums = MM(unpackhi_epi16)(sum73, sum51);
    VECTOR even0 = MM(add_epi32)(DOT(row04, 8192, 8192), MM(set1_epi32)(offset));
    VECTOR even1 = MM(add_epi32)(DOT(row04, 8192, -8192), MM(set1_epi32)(offset));
    VECTOR even2 = DOT(row26, FIX(0.541196100), FIX(0.541196100) - FIX(1.847759065));
    VECTOR even3 = DOT(row26, FIX(0.541196100) + FIX(0.765366865), FIX(0.541196100));
    VECTOR z3 = DOT(sums, FIX(1.175875602) - FIX(1.961570560), FIX(1.175875602));
    VECTOR z4 = DOT(sums, FIX(1.175875602), FIX(1.175875602) - FIX(0.390180644));
    VECTOR odd[4] = {
        MM(add_epi32)(DOT(row71, -FIX(0.899976223), FIX(1.501321110) - FIX(0.899976223)), z4),
        MM(add_epi32)(DOT(row53, -FIX(2.562915447), FIX(3.072711026) - FIX(2.562915447)), z3),
        MM(add_epi32)(DOT(row53, FIX(2.053119869) - FIX(2.562915447), -FIX(2.562915447)), z4),
        MM(add_epi32)(DOT(row71, FIX(0.298631336) - FIX(0.899976223), -FIX(0.899976223)), z3),
    };
    VECTOR even[4] = {MM(add_epi32)(even0, even3), MM(add_epi32)(even1, even2),
        MM(sub_epi32)(even1, even2), MM(sub_epi32)(even0, even3)};
    for (int n = 0; n < 4; n++) {
        out[n] = MM(srai_epi32)(MM(add_epi32)(even[n], odd[n]), shift);
        out[7 - n] = MM(srai_epi32)(MM(sub_epi32)(even[n], odd[n]), shift);
    }
}
#undef VECTOR
#undef DOT
#undef PAIR
#undef MM
#undef IDCT8
