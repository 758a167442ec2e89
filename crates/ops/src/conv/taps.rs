//! One dim of a convolution in tap form: output `at` reads source `at · stride + offset(tap)`.
//!
//! A convolution has this form. So has its input gradient, one phase at a time: the image pixels that are `r` modulo the
//! stride are read only by every so-many-th tap, and among themselves they walk the gradient with stride one.

/// Outputs, taps and the sources they read along one dim. Taps and their offsets are arithmetic progressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taps {
    pub outputs: usize,
    /// Pixels there are; what lies outside is zero.
    pub source: usize,
    pub stride: usize,
    pub count: usize,
    offset_first: isize,
    offset_step: isize,
    /// Which taps of the whole kernel these are.
    kernel_first: usize,
    kernel_step: usize,
}

/// One dim of a convolution: the pixels of the image and of the output, and how a kernel walks from one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub image: usize,
    pub grid: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
}

impl Taps {
    pub fn forward(Span { image, grid, kernel, stride, padding, dilation }: Span) -> Self {
        Self {
            outputs: grid,
            source: image,
            stride,
            count: kernel,
            offset_first: -(padding as isize),
            offset_step: dilation as isize,
            kernel_first: 0,
            kernel_step: 1,
        }
    }

    /// Image pixels `phase`, `phase + stride`, … as outputs, the gradient's `grid` pixels as source.
    pub fn phase(Span { image, grid, kernel, stride, padding, dilation }: Span, phase: usize) -> Self {
        let meets = |tap: &usize| (tap * dilation) % stride == (phase + padding) % stride;
        let first = (0..kernel.min(stride)).find(meets);
        let step = stride / greatest_common_divisor(stride, dilation);
        let offset = |tap: usize| ((phase + padding) as isize - (tap * dilation) as isize).div_euclid(stride as isize);
        Self {
            outputs: image.saturating_sub(phase).div_ceil(stride),
            source: grid,
            stride: 1,
            count: first.map_or(0, |first| (kernel - first).div_ceil(step)),
            offset_first: offset(first.unwrap_or(0)),
            offset_step: -((step * dilation / stride) as isize),
            kernel_first: first.unwrap_or(0),
            kernel_step: step,
        }
    }

    fn offset(&self, tap: usize) -> isize {
        self.offset_first + tap as isize * self.offset_step
    }

    /// The lowest source any output reads; below zero it is padding.
    pub fn low(&self) -> isize {
        self.offset(0).min(self.offset(self.count.saturating_sub(1)))
    }

    /// How far a tap's offset is above the lowest.
    pub fn above(&self, tap: usize) -> usize {
        (self.offset(tap) - self.low()) as usize
    }

    /// The largest `above`.
    pub fn spread(&self) -> usize {
        self.above(0).max(self.above(self.count.saturating_sub(1)))
    }

    /// Sources from the lowest to the highest read.
    pub fn span(&self) -> usize {
        (self.outputs - 1) * self.stride + self.spread() + 1
    }

    /// The tap's place in the whole kernel.
    pub fn kernel(&self, tap: usize) -> usize {
        self.kernel_first + tap * self.kernel_step
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_invert_the_forward_taps() {
        for (kernel, stride, padding, dilation) in
            [(3, 1, 1, 1), (3, 2, 1, 1), (4, 3, 2, 2), (1, 2, 0, 1), (5, 4, 3, 6)]
        {
            let image: usize = 31;
            let grid = (image + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
            let span = Span { image, grid, kernel, stride, padding, dilation };
            let forward = Taps::forward(span);
            let mut forward_pairs = Vec::new();
            for at in 0..grid {
                for tap in 0..kernel {
                    let source = (at * stride) as isize + forward.offset(tap);
                    if (0..image as isize).contains(&source) {
                        forward_pairs.push((source as usize, tap, at));
                    }
                }
            }
            let mut pairs = Vec::new();
            for phase in 0..stride {
                let taps = Taps::phase(span, phase);
                for at in 0..taps.outputs {
                    for tap in 0..taps.count {
                        let target = at as isize + taps.offset(tap);
                        if (0..grid as isize).contains(&target) {
                            pairs.push((at * stride + phase, taps.kernel(tap), target as usize));
                        }
                    }
                }
            }
            forward_pairs.sort_unstable();
            pairs.sort_unstable();
            assert_eq!(pairs, forward_pairs, "kernel {kernel} stride {stride} padding {padding} dilation {dilation}");
        }
    }
}
