use super::*;
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::Setting;
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

fn settings() -> Settings {
    Settings::new("data", "job.toml:1")
}

fn open_names(names: &[&str], settings: &Settings) -> OpenedFiles {
    let files: Vec<DataFile> = names.iter().map(|name| DataFile::at(&path(name)).unwrap()).collect();
    open(&files, settings)
}

fn columns(reader: &dyn Reader) -> Vec<(&str, RecordKind)> {
    reader.columns().iter().map(|column| (column.name.as_str(), column.kind.clone())).collect()
}

#[test]
fn endings_of_keys_are_columns() {
    let reader = open_names(&["pictures.lmdb"], &settings()).unwrap();
    let int = RecordKind::Int { shape: vec![], classes: None };
    assert_eq!(columns(&*reader), [("cls", int), ("image", RecordKind::Image)]);
    assert_eq!(reader.len(), 12);
    let mut record = Record::new();
    for at in (0..12).rev() {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Ints(vec![at as i64 % 3]));
        assert!(matches!(record.value(1), RecordValue::Bytes(bytes) if bytes.starts_with(b"\x89PNG")));
    }
    assert!(reader.read(12, &mut record).is_err());
}

#[test]
fn names_before_numbers_are_columns_and_counts_are_left_out() {
    let reader = open_names(&["words.lmdb"], &settings()).unwrap();
    assert_eq!(columns(&*reader), [("image", RecordKind::Image), ("label", RecordKind::Text)]);
    assert_eq!(reader.len(), 6);
    let mut record = Record::new();
    reader.read(4, &mut record).unwrap();
    assert_eq!(record.value(1), &RecordValue::Text("word 5".into()));
}

#[test]
fn long_values_and_trees_of_several_pages_are_read() {
    let reader = open_names(&["texts.mdb", "texts.mdb"], &settings()).unwrap();
    assert_eq!(columns(&*reader), [("value", RecordKind::Text)]);
    assert_eq!(reader.len(), 96);
    let mut record = Record::new();
    for at in 0..96 {
        reader.read(at, &mut record).unwrap();
        let text = format!("text {} ", at % 48).repeat(if at % 48 % 20 == 0 { 600 } else { 1 });
        assert_eq!(record.value(0), &RecordValue::Text(text));
    }
}

#[test]
fn a_database_within_is_chosen_by_name() {
    let error = open_names(&["arrays.mdb"], &settings()).unwrap_err().to_string();
    assert!(error.contains("named databases: train") && error.contains("database = \"train\""), "{error}");
    let with = |name: &str| {
        let mut settings = settings();
        settings.set("database", "job.toml:2", Setting::Text(name.into()));
        open_names(&["arrays.mdb"], &settings)
    };
    let reader = with("train").unwrap();
    assert_eq!(columns(&*reader), [("value", RecordKind::Real { shape: vec![2, 3] })]);
    let mut record = Record::new();
    for at in 0..5 {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Reals(vec![at as f32; 6]));
    }
    assert!(with("tran").unwrap_err().to_string().contains("no database named \"tran\""));
}

#[test]
fn keys_of_json_objects_are_columns() {
    let reader = open_names(&["json.mdb"], &settings()).unwrap();
    let int = RecordKind::Int { shape: vec![], classes: None };
    assert_eq!(columns(&*reader), [("id", int), ("s", RecordKind::Text)]);
    let mut record = Record::new();
    for at in 0..5 {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Ints(vec![at as i64]));
        assert_eq!(record.value(1), &RecordValue::Text(format!("t{at}")));
    }
}

#[test]
fn pickles_are_refused_by_key_and_an_empty_environment_has_no_records() {
    let error = open_names(&["pickled.mdb"], &settings()).unwrap_err().to_string();
    assert!(error.contains("key \"000\": its value is a Python pickle"), "{error}");
    assert_eq!(open_names(&["empty.mdb"], &settings()).unwrap().len(), 0);
}

#[test]
fn environments_are_told_by_their_contents() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("data.mdb");
    std::fs::copy(path("json.mdb"), &copy).unwrap();
    for path in [dir.path(), &copy] {
        assert_eq!(crate::format::choose(&[DataFile::at(path).unwrap()], &settings()).unwrap().name, "lmdb");
    }
}

/// A damaged tree is an error that names the file and the page, never a crash or an endless walk.
#[test]
fn pages_that_make_no_sense_are_told() {
    let bytes = std::fs::read(path("texts.mdb")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("damaged.mdb");
    let attempt = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        open(&[DataFile::at(&file).unwrap()], &settings()).unwrap_err().to_string()
    };
    // Both meta pages name the root at byte 16 + 24 + 48 + 40.
    let root = |bytes: &mut Vec<u8>, page: u64| {
        for meta in [0, 4096] {
            bytes[meta + 128..meta + 136].copy_from_slice(&page.to_le_bytes());
        }
    };
    assert!(attempt(&|bytes| bytes[16] = 0).contains("byte 0: this is not an LMDB file"));
    assert!(attempt(&|bytes| root(bytes, 1 << 60)).contains("lies past the end of the file"));
    assert!(attempt(&|bytes| root(bytes, 1)).contains("page 1 is out of place"));
    assert!(attempt(&|bytes| bytes.truncate(4096)).contains("damaged.mdb"));
    // Every page names itself as its child.
    let circle = attempt(&|bytes| {
        for page in 2..bytes.len() / 4096 {
            let at = page * 4096;
            let node = usize::from(u16::from_le_bytes([bytes[at + 16], bytes[at + 17]])).min(4000);
            bytes[at + node..at + node + 4].copy_from_slice(&(page as u32).to_le_bytes());
        }
    });
    assert!(circle.contains("damaged.mdb, byte "), "{circle}");
}

#[test]
fn labels_come_from_a_table_of_keys() {
    let directory = tempfile::tempdir().unwrap();
    let table = directory.path().join("labels.csv");
    let with = |text: &str| {
        std::fs::write(&table, text).unwrap();
        let mut settings = settings();
        settings.set("labels", "job.toml:2", Setting::Text(table.display().to_string()));
        open_names(&["texts.mdb"], &settings)
    };
    let plain = open_names(&["texts.mdb"], &settings()).unwrap();
    let contents = DataFile::at(&path("texts.mdb")).unwrap().contents(&settings()).unwrap();
    let (environment, _) = Environment::open(contents, "").unwrap();
    let key = |entry: &Entry| String::from_utf8(keys::whole_key(&environment.contents, entry).unwrap()).unwrap();
    let lines: Vec<String> = environment.entries[0]
        .iter()
        .enumerate()
        .map(|(at, entry)| format!("{},{}\n", key(entry), ["even", "odd"][at % 2]))
        .collect();
    // In any order.
    let text = ["key,label\n".to_string()].into_iter().chain(lines.iter().rev().cloned()).collect::<String>();
    let reader = with(&text).unwrap();
    assert_eq!((reader.columns().len(), reader.len()), (plain.columns().len() + 1, plain.len()));
    let names = ["even", "odd"].map(String::from);
    assert_eq!(columns(&*reader)[1], ("label", RecordKind::Class { names: names[..].into() }));
    let mut record = Record::new();
    for at in [0, 1, 47] {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(1), &RecordValue::Ints(vec![at as i64 % 2]));
    }
    let missing = text.replace(&lines[3], "");
    for (text, part) in [
        (missing.as_str(), "it has no label for the key"),
        ("key,label\na\n", "fewer than two columns"),
        ("key,label\na,\n", "the label of \"a\" is empty"),
        ("key,label\na,1\na,2\n", "\"a\" has a second label"),
    ] {
        match with(text) {
            Err(OpenError::Read(error)) => {
                assert!(error.message.contains(part) && error.file.as_ref() == Some(&table), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
