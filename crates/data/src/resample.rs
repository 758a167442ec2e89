//! Images of another size: two passes of a separable filter, across and then down, in whole numbers.
//!
//! The coefficients have 22 fractional bits and a pass rounds to bytes, as in `Image.resize` of Pillow up to 12.1: the bytes
//! are the same, whatever vectors the processor has. `tests/make_resampled.py` prints Pillow's, with which tests compare them.

use crate::image::Pixels;

/// Fractional bits of a coefficient: a byte times a coefficient, summed over the taps, fits 32 bits.
const FRACTION_BITS: u32 = 22;
const HALF: i32 = 1 << (FRACTION_BITS - 1);
/// Bytes of a row that are summed at once, in registers.
const BLOCK: usize = 32;
/// A pixel is read as this many bytes, whatever its channels.
const LANES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    Bilinear,
    /// Catmull-Rom: a = −0.5.
    Bicubic,
    Box,
    Nearest,
}

impl Filter {
    /// Pixels to either side that count, where the size stays.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Box | Self::Nearest => 0.5,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let distance = x.abs();
        match self {
            Self::Bilinear => (1.0 - distance).max(0.0),
            Self::Bicubic if distance < 1.0 => (1.5 * distance - 2.5) * distance * distance + 1.0,
            Self::Bicubic if distance < 2.0 => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5,
            Self::Bicubic => 0.0,
            Self::Box | Self::Nearest => f64::from(u8::from(x > -0.5 && x <= 0.5)),
        }
    }
}

/// What every sample of a line is made of.
#[derive(Debug, Default)]
struct Taps {
    made_for: Option<(usize, usize, Filter)>,
    /// The first sample that counts, and the coefficients from there: a range of `coefficients`.
    ranges: Vec<(usize, usize, usize)>,
    coefficients: Vec<i32>,
    weights: Vec<f64>,
}

impl Taps {
    /// Computes the coefficients from `from` to `to` samples, unless they are cached.
    fn prepare(&mut self, from: usize, to: usize, filter: Filter) {
        if self.made_for == Some((from, to, filter)) {
            return;
        }
        self.made_for = Some((from, to, filter));
        self.ranges.clear();
        self.coefficients.clear();
        let scale = from as f64 / to as f64;
        if filter == Filter::Nearest {
            // The centers are summed up, as Pillow does: ties fall to the same side.
            let mut center = scale * 0.5;
            for _ in 0..to {
                self.ranges.push(((center as usize).min(from - 1), 0, 1));
                center += scale;
            }
            self.coefficients.push(1 << FRACTION_BITS);
            return;
        }
        let stretch = scale.max(1.0);
        let support = filter.support() * stretch;
        for at in 0..to {
            let center = (at as f64 + 0.5) * scale;
            let first = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            let weight = |sample: usize| filter.weight((sample as f64 - center + 0.5) * (1.0 / stretch));
            self.weights.clear();
            self.weights.extend((first..end).map(weight));
            let sum: f64 = self.weights.iter().sum();
            let sum = if sum == 0.0 { 1.0 } else { sum };
            let fixed = |weight: &f64| (weight / sum * f64::from(1_u32 << FRACTION_BITS)).round() as i32;
            let start = self.coefficients.len();
            self.coefficients.extend(self.weights.iter().map(fixed));
            self.ranges.push((first, start, self.coefficients.len()));
        }
    }

    fn of(&self, at: usize) -> (usize, &[i32]) {
        let (first, start, end) = self.ranges[at];
        (first, &self.coefficients[start..end])
    }

    /// The samples of the line that count at all: first and end.
    fn reach(&self) -> (usize, usize) {
        let end = |(first, start, end): &(usize, usize, usize)| first + (end - start);
        let first = self.ranges.iter().map(|range| range.0).min().unwrap_or(0);
        (first, self.ranges.iter().map(end).max().unwrap_or(0))
    }
}

/// Makes images smaller or larger. Keeps its tables and memory from one image to the next.
#[derive(Debug, Default)]
pub(crate) struct Resampler {
    across: Taps,
    down: Taps,
    /// A row with a few bytes behind it.
    row: Vec<u8>,
    narrow: Vec<u8>,
}

impl Resampler {
    /// Writes `pixels` to `out` with this height and width.
    pub fn resize(
        &mut self,
        pixels: &Pixels,
        (height, width): (usize, usize),
        filter: Filter,
        out: &mut Pixels,
    ) -> Result<(), String> {
        self.resize_with(pixels, (height, width), filter, Avx2::detect(), out)
    }

    fn resize_with(
        &mut self,
        pixels: &Pixels,
        (height, width): (usize, usize),
        filter: Filter,
        wide: Option<Avx2>,
        out: &mut Pixels,
    ) -> Result<(), String> {
        let channels = pixels.channels;
        if !(1..=LANES).contains(&channels) || pixels.bytes.len() != channels * pixels.height * pixels.width {
            return Err(format!("it has {channels} channels and {} bytes", pixels.bytes.len()));
        }
        if [pixels.height, pixels.width, height, width].contains(&0) {
            return Err("a side of it has no pixels".into());
        }
        self.across.prepare(pixels.width, width, filter);
        self.down.prepare(pixels.height, height, filter);
        let (from_row, to_row) = (pixels.width * channels, width * channels);
        let (first, end) = self.down.reach();
        let rows = &pixels.bytes[first * from_row..end * from_row];
        let narrow = if pixels.width == width {
            rows
        } else {
            self.narrow.resize((end - first) * to_row, 0);
            for (from, to) in rows.chunks_exact(from_row).zip(self.narrow.chunks_exact_mut(to_row)) {
                self.row.clear();
                self.row.extend_from_slice(from);
                self.row.resize(from_row + LANES, 0);
                across(&self.across, &self.row, to, channels, wide);
            }
            &self.narrow
        };
        out.bytes.resize(height * to_row, 0);
        (out.channels, out.height, out.width) = (channels, height, width);
        for (at, to) in out.bytes.chunks_exact_mut(to_row).enumerate() {
            let (row, coefficients) = self.down.of(at);
            let from = &narrow[(row - first) * to_row..][..coefficients.len() * to_row];
            down(coefficients, from, to, wide);
        }
        Ok(())
    }
}

/// Proof that the processor has AVX2: only `detect` makes one.
#[derive(Clone, Copy, Debug)]
struct Avx2(());

impl Avx2 {
    fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let has_avx2 = std::is_x86_feature_detected!("avx2");
        #[cfg(not(target_arch = "x86_64"))]
        let has_avx2 = false;
        has_avx2.then_some(Self(()))
    }
}

fn byte(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

/// One row: `to` from `from`, which has a few bytes behind its last pixel.
fn across(taps: &Taps, from: &[u8], to: &mut [u8], channels: usize, wide: Option<Avx2>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(Avx2(())) = wide {
        // SAFETY: there is a proof that the processor has AVX2.
        return unsafe { across_avx2(taps, from, to, channels) };
    }
    let _ = wide;
    across_any(taps, from, to, channels);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn across_avx2(taps: &Taps, from: &[u8], to: &mut [u8], channels: usize) {
    across_any(taps, from, to, channels);
}

#[inline(always)]
fn across_any(taps: &Taps, from: &[u8], to: &mut [u8], channels: usize) {
    for (at, pixel) in to.chunks_exact_mut(channels).enumerate() {
        let (first, coefficients) = taps.of(at);
        let mut sums = [HALF; LANES];
        for (tap, coefficient) in coefficients.iter().enumerate() {
            // The lanes behind the last channel hold the next pixel, and are not looked at.
            let Some(lanes) = from[(first + tap) * channels..].first_chunk::<LANES>() else { break };
            for (sum, lane) in sums.iter_mut().zip(lanes) {
                *sum = sum.wrapping_add(coefficient.wrapping_mul(i32::from(*lane)));
            }
        }
        pixel.iter_mut().zip(sums).for_each(|(value, sum)| *value = byte(sum));
    }
}

/// One row out of as many rows as there are coefficients.
fn down(coefficients: &[i32], from: &[u8], to: &mut [u8], wide: Option<Avx2>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(Avx2(())) = wide {
        // SAFETY: there is a proof that the processor has AVX2.
        return unsafe { down_avx2(coefficients, from, to) };
    }
    let _ = wide;
    down_any(coefficients, from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn down_avx2(coefficients: &[i32], from: &[u8], to: &mut [u8]) {
    down_any(coefficients, from, to);
}

#[inline(always)]
fn down_any(coefficients: &[i32], from: &[u8], to: &mut [u8]) {
    let row = to.len();
    let (blocks, rest) = to.as_chunks_mut::<BLOCK>();
    let whole = blocks.len() * BLOCK;
    for (at, block) in blocks.iter_mut().enumerate() {
        let mut sums = [HALF; BLOCK];
        for (coefficient, line) in coefficients.iter().zip(from.chunks_exact(row)) {
            let Some(bytes) = line[at * BLOCK..].first_chunk::<BLOCK>() else { break };
            for (sum, value) in sums.iter_mut().zip(bytes) {
                *sum = sum.wrapping_add(coefficient.wrapping_mul(i32::from(*value)));
            }
        }
        block.iter_mut().zip(sums).for_each(|(value, sum)| *value = byte(sum));
    }
    for (at, value) in rest.iter_mut().enumerate() {
        let lines = coefficients.iter().zip(from.chunks_exact(row));
        let sum = lines.map(|(coefficient, line)| coefficient.wrapping_mul(i32::from(line[whole + at])));
        *value = byte(sum.fold(HALF, i32::wrapping_add));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(height: usize, width: usize, channels: usize) -> Pixels {
        let value = |at: usize| {
            let (channel, x, y) = (at % channels, at / channels % width, at / channels / width);
            (x * 37 + y * 91 + channel * 53 + x * y * 7 % 29 * 11 + (x * x + 3 * y * y) / 5) as u8
        };
        let bytes = (0..height * width * channels).map(value).collect();
        Pixels { bytes, channels, height, width }
    }

    fn resized(from: &Pixels, to: (usize, usize), filter: Filter, wide: Option<Avx2>) -> Vec<u8> {
        let mut out = Pixels::default();
        Resampler::default().resize_with(from, to, filter, wide, &mut out).unwrap();
        assert_eq!((out.height, out.width, out.channels), (to.0, to.1, from.channels));
        out.bytes
    }

    const FILTERS: [Filter; 4] = [Filter::Bilinear, Filter::Bicubic, Filter::Box, Filter::Nearest];

    /// What Pillow 13.0 makes of `image(5, 7, 3)` with three rows of four pixels.
    const SMALL: [[u8; 36]; 4] = [
        [
            70, 76, 129, 97, 128, 151, 122, 175, 92, 183, 102, 86, 123, 148, 127, 126, 139, 120, 153, 148, 118, 179,
            139, 93, 108, 86, 139, 172, 63, 85, 98, 94, 94, 97, 145, 151,
        ],
        [
            70, 71, 128, 96, 130, 156, 118, 187, 94, 188, 95, 84, 122, 149, 130, 128, 144, 117, 159, 150, 116, 182,
            136, 92, 104, 85, 142, 180, 59, 81, 96, 93, 89, 96, 151, 155,
        ],
        [
            84, 73, 126, 108, 161, 150, 95, 148, 73, 180, 105, 94, 152, 205, 130, 120, 173, 98, 120, 173, 226, 219,
            144, 69, 95, 84, 137, 167, 92, 81, 117, 42, 95, 102, 155, 144,
        ],
        [
            0, 53, 106, 74, 127, 180, 151, 204, 1, 229, 26, 79, 184, 237, 34, 55, 108, 161, 120, 173, 226, 187, 240,
            37, 117, 170, 223, 233, 30, 83, 31, 84, 137, 87, 140, 193,
        ],
    ];

    const SIZES: [((usize, usize), (usize, usize)); 8] = [
        ((31, 47), (16, 16)),
        ((16, 16), (33, 19)),
        ((256, 341), (224, 224)),
        ((5, 300), (64, 7)),
        ((480, 640), (224, 299)),
        ((1, 1), (9, 9)),
        ((40, 40), (40, 13)),
        ((40, 40), (13, 40)),
    ];

    /// CRC-32 of what Pillow makes of images of these sizes, with 1, 3 and 4 channels (the modes L, RGB and CMYK).
    const CHECKSUMS: [[u32; 24]; 4] = [
        [
            473169231, 853277802, 3298105881, 3341419364, 2811087985, 1866757608, 3226255063, 3884644861, 1248469453,
            186260524, 1533727650, 1254895950, 2867758677, 1673335799, 3361458365, 2615512024, 764426577, 1653267946,
            4032304727, 2455753347, 1695490524, 59065904, 1257302670, 2006926638,
        ],
        [
            2117651424, 2884143095, 1877819916, 3288884851, 2461852496, 3223427192, 4085565312, 1546525830, 2041921929,
            1553332203, 459623225, 124076391, 1599463288, 3046816260, 3680327604, 2615512024, 764426577, 1653267946,
            3449287772, 799474906, 219333019, 1191217890, 791159707, 2719114653,
        ],
        [
            3468651070, 3145351670, 3270113141, 2591115790, 274129040, 3357705944, 2498165571, 2167088790, 1745996015,
            2550128158, 813520151, 3849997682, 2140752801, 2319644452, 2158897198, 2615512024, 764426577, 1653267946,
            1774058083, 1581782331, 4180555696, 889657411, 846817528, 2080058554,
        ],
        [
            1855935302, 3930608950, 98505344, 2181556001, 1297585705, 1516352786, 3388119243, 1560889765, 962066197,
            365346467, 3558970427, 1759386027, 2958359346, 3982571989, 2217144144, 2615512024, 764426577, 1653267946,
            1081110334, 3204934370, 3367673704, 4054082013, 1727576223, 3275025243,
        ],
    ];

    /// With and without AVX2: the bytes do not depend on the processor.
    #[test]
    fn bytes_are_those_of_pillow() {
        let checksum = |bytes: &[u8]| {
            let mut crc = flate2::Crc::new();
            crc.update(bytes);
            crc.sum()
        };
        for (at, filter) in FILTERS.into_iter().enumerate() {
            assert_eq!(resized(&image(5, 7, 3), (3, 4), filter, None), SMALL[at], "{filter:?}");
            let cases = SIZES.iter().flat_map(|sizes| [1, 3, 4].map(|channels| (sizes, channels)));
            for (((from, to), channels), expected) in cases.zip(CHECKSUMS[at]) {
                for wide in [None, Avx2::detect()] {
                    let bytes = resized(&image(from.0, from.1, channels), *to, filter, wide);
                    assert_eq!(
                        checksum(&bytes),
                        expected,
                        "{filter:?} {from:?} to {to:?}, {channels} channels, {wide:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn tables_are_made_again_for_other_sizes() {
        let (mut kept, mut out) = (Resampler::default(), Pixels::default());
        for filter in FILTERS {
            for (from, to) in SIZES {
                let image = image(from.0, from.1, 3);
                kept.resize(&image, to, filter, &mut out).unwrap();
                assert!(out.bytes == resized(&image, to, filter, None), "{filter:?} {from:?}");
            }
        }
        let refused = |pixels: &Pixels, to| kept_error(&mut Resampler::default(), pixels, to);
        assert!(refused(&image(3, 3, 1), (0, 4)).contains("no pixels"));
        let short = Pixels { bytes: vec![0; 5], channels: 3, height: 1, width: 2 };
        assert!(refused(&short, (1, 1)).contains("3 channels and 5 bytes"));
    }

    fn kept_error(resampler: &mut Resampler, pixels: &Pixels, to: (usize, usize)) -> String {
        resampler.resize(pixels, to, Filter::Box, &mut Pixels::default()).unwrap_err()
    }
}
