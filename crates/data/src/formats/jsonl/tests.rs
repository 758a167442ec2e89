use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage};
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::Setting;
use kolo_graph::types::DIMS_MAX;

#[test]
fn records_of_the_library_are_read_packed_or_not() {
    for name in ["records.jsonl", "records.jsonl.gz"] {
        let reader = open(&FORMAT, &[file(name)], &[("vocab", Setting::Int(10))]).unwrap();
        assert_eq!(reader.len(), 2);
        let columns: Vec<_> = reader.columns().iter().map(|column| (&column.name[..], column.kind.clone())).collect();
        let int = |shape: &[usize], classes| RecordKind::Int { shape: shape.into(), classes };
        let expected = [
            ("extra", RecordKind::Text),
            ("flag", int(&[], None)),
            ("ids", int(&[2], Some(10))),
            ("n", int(&[], None)),
            ("text", RecordKind::Text),
            ("x", RecordKind::Real { shape: vec![2, 2] }),
        ];
        assert_eq!(columns, expected);
        let values = |at| {
            let record = read(&*reader, at);
            (0..6).map(|column| record.value(column).clone()).collect::<Vec<_>>()
        };
        let (text, ints) =
            (|text: &str| RecordValue::Text(text.into()), |values: &[i64]| RecordValue::Ints(values.into()));
        let reals = |values: &[f32]| RecordValue::Reals(values.into());
        let none = RecordValue::Missing;
        let first =
            [text("{\"a\":[1]}"), ints(&[1]), none.clone(), ints(&[7]), text("häuser\n"), reals(&[1.0, 2.0, 3.0, 4.5])];
        assert_eq!(values(0), first);
        let second = [none.clone(), ints(&[0]), ints(&[3, 9]), none, text(""), reals(&[0.0, 0.0, 0.0, 1.0])];
        assert_eq!(values(1), second);
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_line() {
    // Of two files that were joined, too.
    let bytes = b"\xef\xbb\xbf{\"x\": 1}\n\xef\xbb\xbf\n\xef\xbb\xbf{\"x\": 2}\n\xef\xbb\xbf{\"x\": }\n";
    let (dir, random) = open_bytes(&FORMAT, bytes, &[]);
    for reader in [random, crate::formats::testing::open_stream(&dir.path().join("file.jsonl"), &[])] {
        let reader = reader.unwrap();
        assert_eq!(reader.len(), 3);
        assert_eq!(read(&*reader, 0).value(0), &RecordValue::Ints(vec![1]));
        assert_eq!(read(&*reader, 1).value(0), &RecordValue::Ints(vec![2]));
        assert_eq!(reader.read(2, &mut Record::new()).unwrap_err().offset, Some(bytes.len() as u64 - 2));
    }
    assert!(sniff(Path::new("a"), bytes));
}

/// Python's `json` writes numbers so that JSON does not know.
#[test]
fn numbers_that_are_not_finite_are_read_as_python_writes_them() {
    let bytes = b"{\"n\": 1, \"x\": NaN, \"row\": [1, NaN], \"name\": \"NaN\", \"big\": Infinity}\n\
        {\"n\": NaN, \"x\": 2.5, \"row\": [-Infinity, 2], \"name\": NaN, \"big\": -Infinity}\n\
        {\"n\": 3, \"x\": nan}\n{\"n\": [NaN, }\n";
    let (dir, random) = open_bytes(&FORMAT, bytes, &[]);
    for reader in [random, crate::formats::testing::open_stream(&dir.path().join("file.jsonl"), &[])] {
        let reader = reader.unwrap();
        let kinds: Vec<_> = reader.columns().iter().map(|column| column.kind.clone()).collect();
        let (real, int) = (RecordKind::Real { shape: vec![] }, RecordKind::Int { shape: vec![], classes: None });
        assert_eq!(kinds, [real.clone(), int, RecordKind::Text, RecordKind::Real { shape: vec![2] }, real]);
        let values = |at| {
            let record = read(&*reader, at);
            (0..5).map(|column| record.value(column).clone()).collect::<Vec<_>>()
        };
        let (first, second) = (values(0), values(1));
        assert_eq!(
            first[..3],
            [RecordValue::Reals(vec![f32::INFINITY]), RecordValue::Ints(vec![1]), RecordValue::Text("NaN".into())]
        );
        let RecordValue::Reals(row) = &first[3] else { panic!("{first:?}") };
        assert!(row[0] == 1.0 && row[1].is_nan());
        assert_eq!(first[4], RecordValue::Missing);
        let reals = |values: &[f32]| RecordValue::Reals(values.into());
        let none = RecordValue::Missing;
        assert_eq!(
            second,
            [reals(&[f32::NEG_INFINITY]), none.clone(), none, reals(&[f32::NEG_INFINITY, 2.0]), reals(&[2.5])]
        );
        let error = |at| reader.read(at, &mut Record::new()).unwrap_err();
        let start = |line: usize| {
            bytes.split(|byte| *byte == b'\n').take(line - 1).map(|line| line.len() as u64 + 1).sum::<u64>()
        };
        assert_eq!(error(2).offset, Some(start(3) + 15), "{}", error(2));
        assert_eq!(error(3).offset, Some(start(4) + 12), "{}", error(3));
    }
}

#[test]
fn bad_lines_are_errors_of_their_own() {
    let bytes = b"{\"x\": [1, 2]}\n\n{\"x\": [1}\n[1]\n{\"x\": [1]}\n{\"x\": [1, -2]}";
    let (_dir, reader) = open_bytes(&FORMAT, bytes, &[]);
    let reader = reader.unwrap();
    assert_eq!(reader.len(), 5);
    let error = |at| reader.read(at, &mut Record::new()).unwrap_err();
    assert!(error(1).message.starts_with("line 3: it is not JSON: expected `,` or `]`"), "{}", error(1));
    assert_eq!(error(1).offset, Some(15 + 8));
    assert!(error(2).message.starts_with("line 4: it is not a JSON object"), "{}", error(2));
    assert!(error(3).message.contains("line 5: key \"x\" has a value of the shape [1], but the first one has [2]"));
    assert_eq!(read(&*reader, 4).value(0), &RecordValue::Ints(vec![1, -2]));
    assert_eq!(reader.columns()[0].kind, RecordKind::Int { shape: vec![2], classes: None });
}

#[test]
fn errors_in_packed_files_say_what_their_bytes_count() {
    let bytes = zstd::bulk::compress(b"{\"x\": 1}\n{\"x\": 1}}\n", 1).unwrap();
    let (_dir, reader) = open_bytes(&FORMAT, &bytes, &[]);
    let error = reader.unwrap().read(1, &mut Record::new()).unwrap_err().to_string();
    assert!(error.contains("file.jsonl, byte 17 of what it unpacks to: line 2: it is not JSON"), "{error}");
    let error = read_error(open_bytes(&FORMAT, &bytes[..bytes.len() - 1], &[]).1).to_string();
    let cut = format!("file.jsonl: its zstd data end too early, at byte {} of the packed file", bytes.len() - 1);
    assert!(error.contains(&cut) && error.contains("the file is truncated"), "{error}");
}

#[test]
fn a_key_with_text_and_numbers_is_text_and_says_why() {
    let (_dir, reader) = open_bytes(&FORMAT, b"{\"a\": 1}\n{\"a\": \"one\"}\n{\"a\": 1.5}\n", &[]);
    let reader = reader.unwrap();
    assert_eq!(reader.columns()[0].kind, RecordKind::Text);
    assert_eq!(read(&*reader, 2).value(0), &RecordValue::Text("1.5".into()));
    assert!(reader.kind_reason(0).unwrap().ends_with("line 2: \"one\" is not a number"));
}

/// The time that lists take grows with their number of values, not with two to the power of their depth.
#[test]
fn deep_lists_are_text_and_are_read_at_once() {
    let lists = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    for (depth, is_number) in [(1, true), (DIMS_MAX, true), (DIMS_MAX + 1, false), (100, false)] {
        let (_dir, reader) = open_bytes(&FORMAT, format!("{{\"a\": {}}}\n", lists(depth)).as_bytes(), &[]);
        let reader = reader.unwrap();
        let expected = match is_number {
            true => RecordValue::Ints(vec![1]),
            false => RecordValue::Text(lists(depth)),
        };
        assert_eq!(read(&*reader, 0).value(0), &expected, "{depth}");
    }
    // Of lists that branch, too.
    let tree = (0..DIMS_MAX).fold("1".to_string(), |inner, _| format!("[{inner}, {inner}, {inner}]"));
    let (_dir, reader) = open_bytes(&FORMAT, format!("{{\"a\": {tree}}}\n").as_bytes(), &[]);
    assert_eq!(reader.unwrap().columns()[0].kind, RecordKind::Int { shape: vec![3; DIMS_MAX], classes: None });
}

#[test]
fn lists_of_other_shapes_are_errors_of_their_line() {
    let bytes = b"{\"x\": [[1], [2]]}\n{\"x\": [[1], [2, 3]]}\n{\"x\": [1, 2]}\n";
    let (mut keys, mut record) = (BTreeMap::new(), Record::new());
    let first = object(b"{\"x\": [[1], [2]]}").unwrap();
    columns::note(&mut keys, &first, Path::new("a.jsonl"), 1);
    let columns = [RecordColumn { name: "x".into(), kind: keys["x"].kind(0) }];
    let errors: Vec<Option<String>> = bytes
        .split(|byte| *byte == b'\n')
        .take(3)
        .map(|line| Some(read_line(&columns, line, &mut record).err()?.message))
        .collect();
    let uneven = "key \"x\" has a value that is neither a number nor nested lists of numbers of one shape";
    let other = "key \"x\" has a value of the shape [2], but the first one has [2, 1]";
    assert_eq!(errors, [None, Some(uneven.into()), Some(other.into())]);
}

#[test]
fn wrong_files_are_refused() {
    for (bytes, expected) in [
        (&b""[..], "it is empty"),
        (b"\n \n", "it is empty"),
        (b"{}\n{}\n", "none of its objects has a key"),
        (b"hello\n{", "line 1: it is not JSON"),
        (b"3\n", "not a JSON object"),
    ] {
        let error = read_error(open_bytes(&FORMAT, bytes, &[]).1);
        assert!(error.message.contains(expected) && error.file.is_some(), "{error}");
    }
    let deep = [b"{\"a\":", &vec![b'['; 1 << 20][..]].concat();
    assert!(read_error(open_bytes(&FORMAT, &deep, &[]).1).message.contains("recursion limit"));
    let long = vec![b' '; LINE_BYTES_MAX as usize + 10];
    assert!(read_error(open_bytes(&FORMAT, &long, &[]).1).message.contains("line 1 has more than"));
}

#[test]
fn damaged_files_are_read_or_refused() {
    survive_damage(&FORMAT, &std::fs::read(file("records.jsonl")).unwrap(), &[]);
}
