//! What a reduction means, element by element, as the documents define it. Nothing here is shared with what is tested.

use kolo_comm::{ElementType, Reduction};

/// One element of `left ⊕ right`. Elements are their bits.
fn join(element: ElementType, reduction: Reduction, left: u64, right: u64) -> u64 {
    macro_rules! wrapping {
        ($int:ty) => {{
            let (a, b) = (left as $int, right as $int);
            let joined = match reduction {
                Reduction::Sum | Reduction::Mean => a.wrapping_add(b),
                Reduction::Product => a.wrapping_mul(b),
                Reduction::Min => a.min(b),
                Reduction::Max => a.max(b),
            };
            joined as u64
        }};
    }
    // Sums and products of two f32, bf16 or f16 are exact or rounded once in f64, and rounding on to the element rounds
    // to nearest as in its own arithmetic: f64 has more than twice their digits.
    let float = |a: f64, b: f64| match reduction {
        Reduction::Sum | Reduction::Mean => a + b,
        Reduction::Product => a * b,
        _ if a.is_nan() || b.is_nan() => f64::NAN,
        Reduction::Min => a.min(b),
        Reduction::Max => a.max(b),
    };
    match element {
        ElementType::I32 => wrapping!(i32),
        ElementType::I64 => wrapping!(i64),
        ElementType::U8 => wrapping!(u8),
        _ => store(element, float(load(element, left), load(element, right))),
    }
}

fn load(element: ElementType, bits: u64) -> f64 {
    match element {
        ElementType::F64 => f64::from_bits(bits),
        ElementType::F32 => f64::from(f32::from_bits(bits as u32)),
        ElementType::Bf16 => half::bf16::from_bits(bits as u16).to_f64(),
        _ => half::f16::from_bits(bits as u16).to_f64(),
    }
}

/// A float rounded to the element: halves from f32, as they are combined.
fn store(element: ElementType, value: f64) -> u64 {
    match element {
        ElementType::F64 => value.to_bits(),
        ElementType::F32 => u64::from((value as f32).to_bits()),
        ElementType::Bf16 => u64::from(half::bf16::from_f32(value as f32).to_bits()),
        _ => u64::from(half::f16::from_f32(value as f32).to_bits()),
    }
}

/// The balanced tree over these elements: a left half of the largest power of two that leaves something for the right.
fn tree_of(element: ElementType, reduction: Reduction, values: &[u64]) -> u64 {
    if let [one] = values {
        return *one;
    }
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    join(element, reduction, tree_of(element, reduction, left), tree_of(element, reduction, right))
}

fn mean(element: ElementType, sum: u64, ranks: usize) -> u64 {
    match element {
        ElementType::F64 => (f64::from_bits(sum) / ranks as f64).to_bits(),
        ElementType::I32 => (sum as i32 / ranks as i32) as u64,
        ElementType::I64 => (sum as i64 / ranks as i64) as u64,
        ElementType::U8 => sum / ranks as u64,
        _ => store(element, f64::from(load(element, sum) as f32 / ranks as f32)),
    }
}

/// The tree over these vectors, element by element; of means, divided by the number of ranks.
pub fn tree<V: AsRef<[u8]>>(element: ElementType, reduction: Reduction, vectors: &[V], ranks: usize) -> Vec<u8> {
    let bytes = element.bytes();
    let mut values = vec![0; vectors.len()];
    let mut result = Vec::with_capacity(vectors[0].as_ref().len());
    for at in (0..vectors[0].as_ref().len()).step_by(bytes) {
        for (value, vector) in values.iter_mut().zip(vectors) {
            let mut bits = [0; 8];
            bits[..bytes].copy_from_slice(&vector.as_ref()[at..at + bytes]);
            *value = u64::from_le_bytes(bits);
        }
        let sum = tree_of(element, reduction, &values);
        let whole = if reduction == Reduction::Mean { mean(element, sum, ranks) } else { sum };
        result.extend_from_slice(&whole.to_le_bytes()[..bytes]);
    }
    result
}
