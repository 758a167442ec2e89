use super::*;
use crate::record::{RecordKind, RecordValue};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

fn settings(pairs: &[(&str, Setting)]) -> Settings {
    let mut settings = Settings::new("data", "job.toml:1");
    pairs.iter().for_each(|(key, value)| settings.set(key, "job.toml:2", value.clone()));
    settings
}

fn text(text: &str) -> Setting {
    Setting::Text(text.into())
}

fn open_names(names: &[&str], pairs: &[(&str, Setting)]) -> OpenedFiles {
    let files: Vec<DataFile> = names.iter().map(|name| DataFile::at(&path(name)).unwrap()).collect();
    open(&files, &settings(pairs))
}

/// Record `i` of what `make_tables.py` writes as `table.h5`, by name of the column.
fn expected(i: usize, name: &str) -> RecordValue {
    let int = i as i64;
    match name {
        "x" => {
            let pixel = |channel: usize, at: usize| ((i * 60 + at * 3 + channel) % 256) as u8;
            RecordValue::Bytes((0..60).map(|at| pixel(at / 20, at % 20)).collect())
        }
        "y" => RecordValue::Ints(vec![int * 3 - 7]),
        "weight" => RecordValue::Reals(vec![i as f32 / 4.0]),
        "pairs" => RecordValue::Ints(vec![int * 2, int * 2 + 1]),
        "half" => RecordValue::Reals(vec![i as f32]),
        "name" => RecordValue::Text(format!("řádek {i}")),
        "code" => RecordValue::Text(format!("c{i}")),
        _ => RecordValue::Ints(vec![i64::from(i.is_multiple_of(2))]),
    }
}

#[test]
fn every_value_of_old_and_new_files_is_read() {
    for (names, rows) in [(&["table.h5"][..], 10), (&["table_latest.h5", "table.h5"], 20)] {
        for budget in [0, 256 << 20] {
            let reader = open_names(names, &[("decoded_max", Setting::Int(budget))]).unwrap();
            let columns: Vec<_> = reader.columns().iter().map(|column| column.name.clone()).collect();
            assert_eq!(columns, ["code", "flag", "half", "name", "pairs", "weight", "x", "y"]);
            assert_eq!(reader.columns()[6].kind, RecordKind::Pixels { shape: vec![3, 4, 5] });
            assert_eq!(reader.columns()[4].kind, RecordKind::Int { shape: vec![2], classes: None });
            assert_eq!(reader.len(), rows);
            let mut record = Record::new();
            for step in 0..rows {
                let at = step * 7 % rows;
                reader.read(at, &mut record).unwrap();
                for (column, name) in columns.iter().enumerate() {
                    assert_eq!(record.value(column), &expected(at % 10, name), "{name} of {at}");
                }
            }
            assert!(reader.read(rows, &mut record).is_err());
        }
    }
}

#[test]
fn datasets_are_chosen_by_path_or_by_group() {
    let error = open_names(&["groups.h5"], &[]).unwrap_err().to_string();
    assert!(error.contains("\"test/x\" has 2 records, and \"train/x\" has 6"), "{error}");
    let inputs = ("inputs", Setting::List(vec![text("/train/x")]));
    let by_path = open_names(&["groups.h5"], &[inputs, ("target", text("train/y"))]).unwrap();
    let by_group = open_names(&["groups.h5"], &[("group", text("train"))]).unwrap();
    for (reader, names) in [(by_path, ["/train/x", "train/y"]), (by_group, ["x", "y"])] {
        assert_eq!(reader.columns().iter().map(|column| column.name.as_str()).collect::<Vec<_>>(), names);
        assert_eq!(reader.len(), 6);
        let mut record = Record::new();
        for at in [5, 0, 3] {
            reader.read(at, &mut record).unwrap();
            let first = at as f32 * 3.0;
            assert_eq!(record.value(0), &RecordValue::Reals(vec![first, first + 1.0, first + 2.0]));
            assert_eq!(record.value(1), &RecordValue::Ints(vec![at as i64]));
        }
    }
    let wrong = ("inputs", Setting::List(vec![text("train/z")]));
    let error = open_names(&["groups.h5"], &[wrong]).unwrap_err().to_string();
    assert!(error.contains("no dataset \"train/z\"") && error.contains("train/x"), "{error}");
    assert!(open_names(&["groups.h5"], &[("group", text("tain"))]).unwrap_err().to_string().contains("`data.group`"));
}

#[test]
fn a_type_that_cannot_be_read_is_named() {
    let error = open_names(&["groups.h5"], &[("inputs", Setting::List(vec![text("complex")]))]).unwrap_err();
    assert!(error.to_string().contains("\"complex\" cannot be read (compound)"), "{error}");
}

#[test]
fn datasets_that_are_not_read_matter_only_where_they_are_named() {
    let reader = open_names(&["unread.h5"], &[]).unwrap();
    assert_eq!(reader.columns().iter().map(|column| &column.name[..]).collect::<Vec<_>>(), ["x", "y"]);
    let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
    let expected = [
        ("compound", "compound"),
        ("elsewhere", "stored in another file"),
        ("lists", "lists of different lengths"),
        ("lzf", "packed with LZF"),
        ("reference", "reference"),
        ("scalar", "one value without dims"),
    ];
    assert_eq!(unread, expected);
    let mut record = Record::new();
    (0..6).for_each(|at| reader.read(at, &mut record).unwrap());
    for (name, kind) in expected {
        let error = open_names(&["unread.h5"], &[("inputs", Setting::List(vec![text(name)]))]).unwrap_err().to_string();
        assert!(error.contains("unread.h5, byte ") && error.contains(name) && error.contains(kind), "{error}");
        assert!(!error.contains("damaged"), "{error}");
    }
}

/// The library cannot list a group with a virtual dataset, but opens the others.
#[test]
fn a_virtual_dataset_does_not_hide_those_that_are_named() {
    let error = open_names(&["virtual.h5"], &[]).unwrap_err().to_string();
    assert!(error.contains("unsupported layout class 3 (a virtual dataset)") && !error.contains("damaged"), "{error}");
    let inputs = |name: &str| ("inputs", Setting::List(vec![text(name)]));
    let reader = open_names(&["virtual.h5"], &[inputs("/in/x")]).unwrap();
    let in_group = open_names(&["virtual.h5"], &[inputs("x"), ("group", text("/in"))]).unwrap();
    assert_eq!((reader.len(), in_group.len()), (6, 6));
    let error = open_names(&["virtual.h5"], &[inputs("virtual")]).unwrap_err().to_string();
    assert!(error.contains("(a virtual dataset)"), "{error}");
    assert!(open_names(&["virtual.h5"], &[inputs("none")]).unwrap_err().to_string().contains("\"none\""));
}

#[test]
fn reals_beyond_32_bits_are_errors_of_their_record() {
    let reader = open_names(&["unread.h5"], &[("inputs", Setting::List(vec![text("x")]))]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(path("unread.h5")).unwrap();
    let place = bytes.windows(8).position(|window| window == 4.25_f64.to_le_bytes()).unwrap();
    bytes[place..place + 8].copy_from_slice(&1e300_f64.to_le_bytes());
    let wide = dir.path().join("wide.h5");
    std::fs::write(&wide, bytes).unwrap();
    let inputs = settings(&[("inputs", Setting::List(vec![text("x")]))]);
    let wide = open(&[DataFile::at(&wide).unwrap()], &inputs).unwrap();
    let mut record = Record::new();
    for at in 0..6 {
        reader.read(at, &mut record).unwrap();
        let read = wide.read(at, &mut record).map_err(|error| error.message);
        let message = "dataset \"x\": it has 1e300, which is too large for 32 bits";
        assert_eq!(read, if at == 4 { Err(message.into()) } else { Ok(()) });
    }
}

#[test]
fn the_layout_of_pixels_can_be_said() {
    let inputs = ("inputs", Setting::List(vec![text("x")]));
    let reader = open_names(&["table.h5"], &[inputs, ("layout", text("chw"))]).unwrap();
    assert_eq!(reader.columns()[0].kind, RecordKind::Pixels { shape: vec![4, 5, 3] });
    let mut record = Record::new();
    reader.read(1, &mut record).unwrap();
    assert_eq!(record.value(0), &RecordValue::Bytes((60..120).collect()));
}

#[test]
fn a_file_that_is_cut_names_itself_and_a_byte() {
    let bytes = std::fs::read(path("groups.h5")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut.h5");
    for end in [0, 7, 8, 96, 500] {
        std::fs::write(&cut, &bytes[..end]).unwrap();
        let error = open(&[DataFile::at(&cut).unwrap()], &settings(&[("group", text("train"))])).unwrap_err();
        assert!(error.to_string().contains("cut.h5, byte "), "{end}: {error}");
    }
}
