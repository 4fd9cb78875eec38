//! Vector code without a build per processor: it chooses this processor's widest instructions at run time, and the compiler
//! turns plain loops over fixed-size arrays into vector instructions for each version.
//!
//! A kernel is an `#[inline(always)]` function with a `const FMA: bool`; [`by_simd!`] compiles it once per level.

use std::sync::OnceLock;

use half::f16;
use half::slice::HalfFloatSliceExt as _;

/// Lanes that kernels work in: one AVX-512 register, two of AVX2's, four of NEON's. Packed matrices take memory for a multiple of it
/// of rows.
pub const LANES: usize = 16;

genset_backend_common::named! {
    /// The widest instructions that the CPU computes with, for comparisons and where wide ones make a processor slow.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum IsaChoice: FromStr {
        /// The widest that this processor has.
        #[default]
        Auto = "auto",
        /// AVX-512 with the 8-bit dot product (VNNI).
        Avx512 = "avx512",
        /// AVX2, FMA and F16C, with the 8-bit dot product (AVX-VNNI).
        AvxVnni = "avxvnni",
        /// AVX2, FMA and F16C.
        Avx2 = "avx2",
        /// NEON with the 8-bit dot product, and 8-bit products of matrices.
        I8mm = "i8mm",
        /// NEON with the 8-bit dot product.
        Dotprod = "dotprod",
        /// NEON alone.
        Neon = "neon",
    }
}

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// AVX-512 with the 8-bit dot product (VNNI).
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2, FMA and F16C, with the 8-bit dot product (AVX-VNNI).
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with the 8-bit dot product, and 8-bit products of matrices (i8mm).
    #[cfg(target_arch = "aarch64")]
    NeonMatrix,
    /// NEON with the 8-bit dot product.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// What the target triple guarantees: on ARM NEON.
    Baseline,
}

impl Level {
    /// Its name as an [`IsaChoice`], if there is one for it.
    fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512 without VNNI",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::NeonMatrix => "i8mm",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => "dotprod",
            Self::Baseline if cfg!(target_arch = "aarch64") => "neon",
            Self::Baseline => "what every processor of its kind has",
        }
    }
}

static LEVEL: OnceLock<Level> = OnceLock::new();

/// The level of the kernels: this processor's, unless [`choose_isa`] was called before the first kernel.
pub(super) fn level() -> Level {
    *LEVEL.get_or_init(detect)
}

/// The instructions of this process's kernels, by the name of their [`IsaChoice`] if they have one.
#[must_use]
pub fn isa_name() -> &'static str {
    level().name()
}

/// Limits the instructions of this process's kernels. Returns `false` if others are in use already.
///
/// # Errors
/// This processor lacks the instructions. The message is for the person who chose them.
pub fn choose_isa(isa: IsaChoice) -> Result<bool, String> {
    let detected = detect();
    let chosen = match isa {
        IsaChoice::Auto => return Ok(true),
        #[cfg(target_arch = "x86_64")]
        IsaChoice::Avx512 if detected == Level::Avx512Vnni => Some(detected),
        #[cfg(target_arch = "x86_64")]
        IsaChoice::AvxVnni if has_avx_vnni() => Some(Level::AvxVnni),
        #[cfg(target_arch = "x86_64")]
        IsaChoice::Avx2 if detected != Level::Baseline => Some(Level::Avx2),
        #[cfg(target_arch = "aarch64")]
        IsaChoice::I8mm if detected == Level::NeonMatrix => Some(detected),
        #[cfg(target_arch = "aarch64")]
        IsaChoice::Dotprod if detected != Level::Baseline => Some(Level::NeonDot),
        IsaChoice::Neon if cfg!(target_arch = "aarch64") => Some(Level::Baseline),
        IsaChoice::Avx512
        | IsaChoice::AvxVnni
        | IsaChoice::Avx2
        | IsaChoice::I8mm
        | IsaChoice::Dotprod
        | IsaChoice::Neon => None,
    };
    let chosen = chosen.ok_or_else(|| {
        let has = detected.name();
        format!("this processor has no {isa}, only {has}; leave the flag out")
    })?;
    Ok(*LEVEL.get_or_init(|| chosen) == chosen)
}

/// The instructions of the kernels for quantized weights. A value exists only for what this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizedKernels(QuantizedLevel);

impl QuantizedKernels {
    /// [`quantized_kernels`], and all narrower ones that this processor can run, the widest first. They compute the same bits; this
    /// is for tests, which compare them.
    #[must_use]
    pub fn every() -> Vec<Self> {
        let Some(widest) = quantized_kernels() else {
            return Vec::new();
        };
        #[cfg(target_arch = "x86_64")]
        let all = [
            Some(QuantizedLevel::Avx512Vnni),
            // Builds with debug assertions have them with the instruction of AVX-512 VNNI, too.
            (cfg!(debug_assertions) || has_avx_vnni()).then_some(QuantizedLevel::AvxVnni),
            Some(QuantizedLevel::Avx2),
        ];
        #[cfg(target_arch = "aarch64")]
        let all = [
            Some(QuantizedLevel::NeonMatrix),
            Some(QuantizedLevel::NeonDot),
            Some(QuantizedLevel::Neon),
        ];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let all: [Option<QuantizedLevel>; 0] = [];
        let all = all.into_iter().flatten().map(Self);
        all.skip_while(|kernels| *kernels != widest).collect()
    }

    pub(super) fn level(self) -> QuantizedLevel {
        self.0
    }
}

/// As [`QuantizedKernels`], which is how others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuantizedLevel {
    /// As [`Level::Avx512Vnni`].
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// As [`Level::AvxVnni`].
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// As [`Level::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// As [`Level::NeonMatrix`].
    #[cfg(target_arch = "aarch64")]
    NeonMatrix,
    /// As [`Level::NeonDot`].
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// NEON alone.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// The kernels for quantized weights; `None` if there are none for this processor.
#[must_use]
pub fn quantized_kernels() -> Option<QuantizedKernels> {
    let level = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Vnni => Some(QuantizedLevel::Avx512Vnni),
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => Some(QuantizedLevel::AvxVnni),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx2 => Some(QuantizedLevel::Avx2),
        #[cfg(target_arch = "aarch64")]
        Level::NeonMatrix => Some(QuantizedLevel::NeonMatrix),
        #[cfg(target_arch = "aarch64")]
        Level::NeonDot => Some(QuantizedLevel::NeonDot),
        #[cfg(target_arch = "aarch64")]
        Level::Baseline => Some(QuantizedLevel::Neon),
        #[cfg(not(target_arch = "aarch64"))]
        Level::Baseline => None,
    };
    level.map(QuantizedKernels)
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx_vnni() -> bool {
    has_avx2() && is_x86_feature_detected!("avxvnni")
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let has_avx2 = has_avx2();
    let has_avx512 = has_avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (
        has_avx512 && is_x86_feature_detected!("avx512vnni"),
        has_avx512,
        has_avx_vnni(),
        has_avx2,
    ) {
        (true, _, _, _) => Level::Avx512Vnni,
        (_, true, _, _) => Level::Avx512,
        (_, _, true, _) => Level::AvxVnni,
        (_, _, _, true) => Level::Avx2,
        (..) => Level::Baseline,
    }
}

#[cfg(target_arch = "aarch64")]
fn detect() -> Level {
    use std::arch::is_aarch64_feature_detected;
    let has_dot = is_aarch64_feature_detected!("dotprod");
    match (has_dot && is_aarch64_feature_detected!("i8mm"), has_dot) {
        (true, _) => Level::NeonMatrix,
        (_, true) => Level::NeonDot,
        (..) => Level::Baseline,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> Level {
    Level::Baseline
}

/// Whether the baseline has a fused multiply-add (on x86 also F16C); without it `f32::mul_add` is a slow call.
pub(super) const BASELINE_FMA: bool = cfg!(any(
    target_arch = "aarch64",
    all(target_feature = "fma", target_feature = "f16c")
));

/// Defines a function that runs `$inner::<FMA>` compiled for this processor.
macro_rules! by_simd {
    ($(#[$meta:meta])* fn $name:ident $(<$(const $generic:ident : usize),+ $(; $type:ident : $bound:path)?>)? ($($arg:ident : $ty:ty),* $(,)?) = $inner:ident) => {
        $(#[$meta])*
        pub(super) fn $name $(<$(const $generic: usize),+ $(, $type: $bound)?>)? ($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512 $(<$(const $generic: usize),+ $(, $type: $bound)?>)? ($($arg: $ty),*) {
                    $inner::<true $($(,$generic)+ $(,$type)?)?>($($arg),*);
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2 $(<$(const $generic: usize),+ $(, $type: $bound)?>)? ($($arg: $ty),*) {
                    $inner::<true $($(,$generic)+ $(,$type)?)?>($($arg),*);
                }
                match $crate::simd::level() {
                    $crate::simd::Level::Avx512Vnni | $crate::simd::Level::Avx512 => {
                        // SAFETY: `level` detected these features on this processor.
                        #[expect(unsafe_code, reason = "run-time choice of instructions")]
                        return unsafe { avx512 $(::<$($generic),+ $(,$type)?>)? ($($arg),*) };
                    }
                    $crate::simd::Level::AvxVnni | $crate::simd::Level::Avx2 => {
                        // SAFETY: as above.
                        #[expect(unsafe_code, reason = "run-time choice of instructions")]
                        return unsafe { avx2 $(::<$($generic),+ $(,$type)?>)? ($($arg),*) };
                    }
                    $crate::simd::Level::Baseline => {}
                }
            }
            $inner::<{ $crate::simd::BASELINE_FMA } $($(,$generic)+ $(,$type)?)?>($($arg),*);
        }
    };
}
pub(super) use by_simd;

/// `a * b + c`, fused if there is an instruction.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds `factors[i] * lanes` to the `i`th total. Written with intrinsics for x86, where the compiler does not find it.
#[inline(always)]
pub(super) fn multiply_add<const FMA: bool, const N: usize>(
    factors: &[f32; N],
    lanes: &[f32; LANES],
    totals: &mut [[f32; LANES]; N],
) {
    #[cfg(target_arch = "x86_64")]
    if FMA {
        use std::arch::x86_64::{
            _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_storeu_ps,
        };
        for i in 0..N {
            for half in 0..LANES / 8 {
                let total = totals[i][half * 8..].as_mut_ptr();
                #[expect(unsafe_code, reason = "intrinsics of the processor")]
                // SAFETY: `FMA` implies that the processor has the instructions; eight numbers are read and written in
                // arrays of sixteen.
                unsafe {
                    let lanes = _mm256_loadu_ps(lanes[half * 8..].as_ptr());
                    let sum =
                        _mm256_fmadd_ps(_mm256_set1_ps(factors[i]), lanes, _mm256_loadu_ps(total));
                    _mm256_storeu_ps(total, sum);
                }
            }
        }
        return;
    }
    for (totals, &factor) in totals.iter_mut().zip(factors) {
        for (total, &lane) in totals.iter_mut().zip(lanes) {
            *total = fma::<FMA>(factor, lane, *total);
        }
    }
}

/// Converts sixteen half-precision numbers to f32. `FMA` also implies that the processor has F16C.
#[inline(always)]
pub(super) fn widen<const FMA: bool>(numbers: &[f16; LANES]) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    #[cfg(target_arch = "x86_64")]
    if FMA {
        use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        for half in 0..LANES / 8 {
            #[expect(unsafe_code, reason = "intrinsics of the processor")]
            // SAFETY: `FMA` implies that the processor has the instructions; eight numbers are read and written in arrays of
            // sixteen.
            unsafe {
                let wide = _mm256_cvtph_ps(_mm_loadu_si128(numbers[half * 8..].as_ptr().cast()));
                _mm256_storeu_ps(lanes[half * 8..].as_mut_ptr(), wide);
            }
        }
        return lanes;
    }
    numbers.convert_to_f32_slice(&mut lanes);
    lanes
}

/// `e^x` to about one unit in the last place, for `x` in -87..88 (clamped), in operations that vectorize.
///
/// # Source
/// Range reduction by powers of two and the minimax polynomial of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const ROUND_BITS: u32 = 0x4B40_0000;
    let x = x.clamp(-87.3, 88.3);
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_2e-4;
    for c in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_66,
        0.5,
    ] {
        p = fma::<FMA>(p, r, c);
    }
    let p = fma::<FMA>(p, r * r, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND_BITS).wrapping_add(127);
    p * f32::from_bits(exponent << 23)
}

/// `tanh(x)`.
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    1.0 - 2.0 / (exp::<FMA>(2.0 * x) + 1.0)
}

/// The sum of `term` over `values`, in an order that depends only on their number.
#[inline(always)]
pub(super) fn sum_of<const FMA: bool>(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail: f32 = chunks.remainder().iter().map(|&v| term(v)).sum();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += term(v);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0] + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_instructions_are_refused_by_the_names_of_the_flag() {
        let missing = match cfg!(target_arch = "aarch64") {
            true => IsaChoice::Avx2,
            false => IsaChoice::Neon,
        };
        let problem = choose_isa(missing).unwrap_err();
        let has = detect().name();
        assert!(problem.contains(&format!("no {missing}, only {has};")));
        #[cfg(target_arch = "x86_64")]
        for (level, choice) in [
            (Level::Avx512Vnni, IsaChoice::Avx512),
            (Level::AvxVnni, IsaChoice::AvxVnni),
            (Level::Avx2, IsaChoice::Avx2),
        ] {
            assert_eq!(level.name(), choice.to_string());
        }
    }

    #[test]
    fn exp_is_close() {
        for i in -8000..8000u16 as i32 {
            let x = f32::from(i16::try_from(i).unwrap()) / 100.0;
            let want = f64::from(x).exp();
            for got in [exp::<true>(x), exp::<false>(x)] {
                assert!(
                    ((f64::from(got) - want) / want).abs() < 3e-7,
                    "exp({x}) = {got}, not {want}"
                );
            }
        }
    }

    #[test]
    fn halves_are_widened_exactly() {
        for first in (0..=u16::MAX - 15).step_by(16) {
            let halves: [f16; LANES] =
                std::array::from_fn(|lane| f16::from_bits(first + u16::try_from(lane).unwrap()));
            let want = halves.map(f16::to_f32);
            let has_f16c = level() != Level::Baseline || BASELINE_FMA;
            let fast = has_f16c.then(|| widen::<true>(&halves));
            for got in [Some(widen::<false>(&halves)), fast].into_iter().flatten() {
                for (got, want) in got.into_iter().zip(want) {
                    assert!(
                        got == want || got.is_nan() && want.is_nan(),
                        "{got}, not {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn tanh_is_close_and_saturates() {
        for x in [-100.0f32, -3.0, -0.5, 0.0, 0.01, 0.7, 4.0, 100.0] {
            assert!((tanh::<false>(x) - x.tanh()).abs() < 2e-7, "{x}");
        }
    }
}
