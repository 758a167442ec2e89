//! Products against sums in the order that the kernels promise.

use kolo_graph::Team;
use kolo_ops::gemm::*;
use kolo_ops::tiles::Address;
use std::ops::Range;

fn numbers(count: usize, salt: u32) -> Vec<f32> {
    (0..count as u32).map(|at| ((at.wrapping_mul(2_654_435_761) ^ salt) >> 16) as f32 / 65536.0 - 0.5).collect()
}

fn product(m: usize, n: usize, k: usize, threads: usize, ta: bool, tb: bool, prepacked: bool) -> Vec<f32> {
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let team = Team::new(threads);
    let mut c = vec![0.0; m * n];
    let mut scratch = vec![0.0; SCRATCH * threads];
    let a = Strided { data: &a, line_stride: if ta { 1 } else { k }, k_stride: if ta { m } else { 1 } };
    let b = Strided { data: &b, line_stride: if tb { k } else { 1 }, k_stride: if tb { 1 } else { n } };
    let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
    let mut packed_memory = vec![0.0; prepacked_len(n, k)];
    let right = match prepacked {
        true => Right::Packed(prepack(&b, n, k, &mut packed_memory)),
        false => Right::Fresh(&b),
    };
    let bias: Vec<f32> = (0..n).map(bias).collect();
    Gemm { shape: [m, n, k], a: &a, b: right, c: &sink, start: Start::Bias(&bias) }.run_on(&team, &mut scratch);
    c
}

/// Block after block, in each term after term, as the kernel promises.
fn plain(m: usize, n: usize, k: usize, ta: bool, tb: bool) -> Vec<f32> {
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let term = |row: usize, column: usize, at: usize| {
        let x = if ta { a[at * m + row] } else { a[row * k + at] };
        (x, if tb { b[column * k + at] } else { b[at * n + column] })
    };
    let blocks = k.div_ceil(256).max(1);
    let size = k.div_ceil(blocks).next_multiple_of(4).clamp(1, 256);
    let element = |row: usize, column: usize| {
        (0..k).step_by(size).fold(bias(column), |total, start| {
            let terms = (start..(start + size).min(k)).map(|at| term(row, column, at));
            total + terms.fold(0.0f32, |sum, (x, y)| x.mul_add(y, sum))
        })
    };
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

fn bias(column: usize) -> f32 {
    (column % 7) as f32 * 0.125
}

/// A product over the first terms of an operand that was packed for more of them keeps its cuts, on every path: tiles in
/// place, at the right border, and those that another thread makes.
#[test]
fn a_prefix_of_a_packed_operand_keeps_its_cuts() {
    let (m, n, k, used) = (50, 70, 600, 330);
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let mut packed_memory = vec![0.0; prepacked_len(n, k)];
    let packed = prepack(&Strided { data: &b, line_stride: 1, k_stride: n }, n, k, &mut packed_memory);
    let run = |columns: Range<usize>, threads: usize| {
        let mut c = vec![0.0; m * n];
        let mut scratch = vec![0.0; SCRATCH * threads];
        let a = Strided { data: &a, line_stride: k, k_stride: 1 };
        let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
        let right = Right::<Strided<'_>>::Packed(packed);
        let gemm = Gemm { shape: [m, n, used], a: &a, b: right, c: &sink, start: Start::Zero };
        match threads {
            1 => gemm.run_block(0..m, columns, &mut scratch),
            _ => gemm.run_on(&Team::new(threads), &mut scratch),
        }
        c
    };
    let whole = run(0..n, 1);
    let size = 200; // 600 terms are three blocks
    let element = |row: usize, column: usize| {
        (0..used).step_by(size).fold(0.0, |total: f32, start| {
            let terms = start..(start + size).min(used);
            total + terms.fold(0.0f32, |sum, at| a[row * k + at].mul_add(b[at * n + column], sum))
        })
    };
    assert_eq!(whole, (0..m * n).map(|at| element(at / n, at % n)).collect::<Vec<_>>());
    assert_eq!(whole, run(0..n, 2));
    let part = run(0..37.min(n), 1);
    (0..m).for_each(|row| assert_eq!(whole[row * n..row * n + 37], part[row * n..row * n + 37]));
}

#[test]
fn matches_the_definition_in_every_form() {
    for (m, n, k) in [
        (1, 1, 1),
        (5, 7, 3),
        (12, 32, 256),
        (13, 33, 257),
        (16, 100, 600),
        (400, 40, 20),
        (3, 1100, 5),
        (2, 3, 0),
        (64, 131, 70),
        (30, 200, 1100),
        // More rows than a block of packed or moved ones, and than one of rows read where they lie.
        (1100, 33, 300),
        (1100, 33, 40),
        // Few columns: turned, in several parts, one of them with several blocks of terms.
        (600, 10, 40),
        (64, 5, 1100),
        (3000, 10, 40),
        // One row: several strips of columns, several chains, terms left over.
        (1, 2100, 530),
        (1, 37, 6),
    ] {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let got = product(m, n, k, 1, ta, tb, false);
            let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            for row in 0..m {
                for column in 0..n {
                    let want = (0..k)
                        .map(|at| {
                            let x = if ta { a[at * m + row] } else { a[row * k + at] };
                            let y = if tb { b[column * k + at] } else { b[at * n + column] };
                            f64::from(x) * f64::from(y)
                        })
                        .sum::<f64>()
                        + f64::from(bias(column));
                    let got = f64::from(got[row * n + column]);
                    assert!(
                        (got - want).abs() < 1e-5 * want.abs().max(10.0),
                        "{m}x{n}x{k} {ta} {tb} at {row},{column}: {got} {want}"
                    );
                }
            }
            // The bits are those of blocks in order, whatever way the product went.
            assert_eq!(got, plain(m, n, k, ta, tb), "{m}x{n}x{k} {ta} {tb}: another order of terms");
            assert_eq!(got, product(m, n, k, 2, ta, tb, false), "two threads differ");
            assert_eq!(got, product(m, n, k, 1, ta, tb, true), "prepacked differs");
        }
    }
}

/// Operands that are parts of wider ones give the bits of their copies: what lies between their lines does not matter.
#[test]
fn a_part_of_the_terms_has_the_bits_of_its_copy() {
    for (m, n, ks, start, len) in
        [(50, 70, 600, 100, 330), (1, 70, 300, 17, 270), (64, 1, 300, 8, 64), (7, 9, 20, 3, 16)]
    {
        let (a, b) = (numbers(m * ks, 1), numbers(ks * n, 2));
        for (ta, tb, threads) in [(false, false, 1), (true, false, 2), (false, true, 2), (true, true, 1)] {
            let run = |a: Strided<'_>, b: Strided<'_>| {
                let mut c = vec![0.0; m * n];
                let mut scratch = vec![0.0; SCRATCH * threads];
                let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
                let gemm = Gemm { shape: [m, n, len], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero };
                gemm.run_on(&Team::new(threads), &mut scratch);
                c
            };
            let strided = |data: &[f32], lines: usize, is_k_last: bool| {
                let (line_stride, k_stride) = if is_k_last { (ks, 1) } else { (1, lines) };
                let copied = |is_k_last: bool| {
                    let element = |line: usize, k: usize| data[line * line_stride + (start + k) * k_stride];
                    match is_k_last {
                        true => (0..lines * len).map(|at| element(at / len, at % len)).collect::<Vec<f32>>(),
                        false => (0..lines * len).map(|at| element(at % lines, at / lines)).collect(),
                    }
                };
                (start * k_stride, line_stride, k_stride, copied(is_k_last), if is_k_last { len } else { 1 })
            };
            let (a_at, a_line, a_k, a_copy, a_copy_line) = strided(&a, m, !ta);
            let (b_at, b_line, b_k, b_copy, b_copy_line) = strided(&b, n, tb);
            let part = run(
                Strided { data: &a[a_at..], line_stride: a_line, k_stride: a_k },
                Strided { data: &b[b_at..], line_stride: b_line, k_stride: b_k },
            );
            let copy = run(
                Strided { data: &a_copy, line_stride: a_copy_line, k_stride: if ta { m } else { 1 } },
                Strided { data: &b_copy, line_stride: b_copy_line, k_stride: if tb { 1 } else { n } },
            );
            assert_eq!(part, copy, "{m} {n} {ks} {ta} {tb}");
        }
    }
}

/// A product of halves has the bits of the f32 product of the same numbers, rounded once, whichever way they lie.
#[test]
fn halves_are_multiplied_as_f32_is() {
    use kolo_graph::cpu::Buffer;
    use kolo_graph::{DType, Type};
    use kolo_ops::halves::{is_half, round, widen};
    let half = |dtype: DType, values: &[f32]| {
        let mut bits = vec![0u16; values.len()];
        round(dtype, values, &mut bits);
        let mut exact = vec![0.0; values.len()];
        widen(dtype, &bits, &mut exact);
        (bits, exact)
    };
    let shapes = [(3, 5, 7), (70, 130, 300), (270, 390, 40), (13, 33, 513), (1, 40, 20), (40, 1, 20), (5, 4, 0)];
    for (dtype, (m, n, k)) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape)))
    {
        let ((a_bits, a), (b_bits, b)) = (half(dtype, &numbers(m * k, 1)), half(dtype, &numbers(k * n, 2)));
        let bias: Vec<f32> = (0..n).map(bias).collect();
        for (ta, tb, threads) in [(false, false, 1), (true, false, 2), (false, true, 2), (true, true, 3)] {
            let (a_strides, b_strides) = (if ta { (1, m) } else { (k, 1) }, if tb { (k, 1) } else { (1, n) });
            let run = |result: DType, a: Lines<'_>, b: Lines<'_>| {
                let mut c = vec![0u8; m * n * 4];
                let buffer = Buffer { data: c.as_mut_ptr(), ty: Type::new(result, [m, n]) };
                let sink = Output::of(&buffer, 0, n);
                let mut scratch = vec![0.0; scratch_bytes_of(result, 0, threads) / 4];
                Gemm { shape: [m, n, k], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Bias(&bias) }
                    .run_on(&Team::new(threads), &mut scratch);
                c.truncate(buffer.ty.bytes());
                c
            };
            let strided = |data, (line_stride, k_stride)| Lines::Full(Strided { data, line_stride, k_stride });
            let lines = |data, (line_stride, k_stride)| Lines::Half(HalfLines { data, dtype, line_stride, k_stride });
            let wanted = run(DType::F32, strided(&a, a_strides), strided(&b, b_strides));
            let name = format!("{m}×{n}×{k} {ta} {tb}");
            let (left, right) = (lines(&a_bits, a_strides), lines(&b_bits, b_strides));
            assert_eq!(run(DType::F32, left, right), wanted, "{} {name}: a wide product", dtype.name());
            let values: Vec<f32> =
                wanted.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
            let rounded: Vec<u8> = half(dtype, &values).0.into_iter().flat_map(u16::to_le_bytes).collect();
            assert!(is_half(dtype));
            assert_eq!(run(dtype, left, right), rounded, "{} {name}", dtype.name());
        }
    }
}
