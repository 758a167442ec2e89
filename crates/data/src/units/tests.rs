use super::*;
use crate::record::{RecordKind, RecordValue};
use std::sync::atomic::AtomicUsize;

#[derive(Debug)]
struct Counting {
    decoded: Arc<AtomicUsize>,
    rows: usize,
}

impl Decode for Counting {
    fn path(&self, _: usize) -> &Path {
        Path::new("counting")
    }

    fn decode(&self, unit: usize, out: &mut Rows) -> Result<(), ReadError> {
        self.decoded.fetch_add(1, Ordering::Relaxed);
        if unit == 7 {
            return Err(ReadError::new("seven", "eight"));
        }
        let mut record = Record::new();
        for row in 0..self.rows {
            record.ints(0).push((unit * self.rows + row) as i64);
            let text = record.text(1);
            text.clear();
            text.push_str(&"x".repeat(row % 5));
            match (unit, row) {
                (3, 2) => out.push_broken("row two of unit three"),
                _ => out.push(&record),
            }
            if row % 10 == 9 {
                out.end_block()?;
            }
        }
        Ok(())
    }
}

fn units(budget: usize) -> (Units, Arc<AtomicUsize>) {
    let kinds = [RecordKind::Int { shape: vec![], classes: None }, RecordKind::Text];
    let columns = kinds.map(|kind| RecordColumn { name: "c".into(), kind });
    let decoded = Arc::<AtomicUsize>::default();
    let decoder = Counting { decoded: Arc::clone(&decoded), rows: 25 };
    (Units::new(Box::new(decoder), columns.into(), &[25; 10], budget), decoded)
}

fn check(units: &Units, at: usize) {
    let mut record = Record::new();
    let result = units.read(at, &mut record);
    match (at / 25, at % 25) {
        (3, 2) => assert_eq!(result.unwrap_err().message, "row two of unit three"),
        (7, _) => assert_eq!(result.unwrap_err().message, "seven"),
        (_, row) => {
            result.unwrap();
            assert_eq!(record.value(0), &RecordValue::Ints(vec![at as i64]));
            assert_eq!(record.value(1), &RecordValue::Text("x".repeat(row % 5)));
        }
    }
}

#[test]
fn every_row_comes_out_right_in_any_order_and_budget() {
    for budget in [0, 700, 1_500, 1 << 20] {
        let (units, decoded) = units(budget);
        assert_eq!(units.len(), 250);
        for turn in 0..4 {
            (0..250).for_each(|step| check(&units, (step * 77 + turn) % 250));
        }
        assert!(units.read(250, &mut Record::new()).is_err());
        assert_eq!(decoded.load(Ordering::Relaxed), 10, "budget {budget}: a shuffled epoch decodes a unit once");
    }
}

#[test]
fn a_scan_keeps_to_the_budget_and_writes_nothing() {
    // A unit takes some 700 bytes: less than a quarter of the budget, and all of them take more than the budget.
    let (units, decoded) = units(4_000);
    for _ in 0..2 {
        (0..250).for_each(|at| check(&units, at));
        assert!(units.bytes_in_memory.load(Ordering::Relaxed) <= 4_000);
    }
    assert_eq!(units.spill.next.load(Ordering::Relaxed), 0);
    assert!((10..=20).contains(&decoded.load(Ordering::Relaxed)));
}

#[test]
fn threads_see_the_same_rows() {
    let (units, _) = units(1_500);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let units = &units;
            scope.spawn(move || (0..500).for_each(|step| check(units, (step * 101 + thread * 13) % 250)));
        }
    });
}
