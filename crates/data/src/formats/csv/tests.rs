use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage, text};
use crate::record::RecordValue;
use kolo_graph::settings::Setting;

const INT: RecordKind = RecordKind::Int { shape: vec![], classes: None };

fn names(reader: &dyn Reader) -> Vec<&str> {
    reader.columns().iter().map(|column| column.name.as_str()).collect()
}

fn opened(bytes: &[u8], keys: &[(&str, Setting)]) -> (tempfile::TempDir, Box<dyn Reader>) {
    let (dir, opened) = open_bytes(&FORMAT, bytes, keys);
    (dir, opened.unwrap())
}

#[test]
fn a_table_of_the_library_is_read() {
    let reader = open(&FORMAT, &[file("table.csv")], &[]).unwrap();
    assert_eq!(reader.len(), 3);
    assert_eq!(names(&*reader), ["id", "height", "name", "note", "label"]);
    let kinds: Vec<_> = reader.columns().iter().map(|column| column.kind.clone()).collect();
    let real = RecordKind::Real { shape: vec![] };
    assert_eq!(kinds, [INT, real, RecordKind::Text, RecordKind::Text, INT]);
    let values = |at| {
        let record = read(&*reader, at);
        (0..5).map(|column| record.value(column).clone()).collect::<Vec<_>>()
    };
    let text = |text: &str| RecordValue::Text(text.into());
    let ints = |value| RecordValue::Ints(vec![value]);
    let last = [ints(-3), RecordValue::Reals(vec![0.001]), text("Žofie"), text("plain"), ints(1)];
    assert_eq!(values(2), last);
    let quoted = "says \"hi\",\nand more";
    assert_eq!(values(0), [ints(1), RecordValue::Reals(vec![1.5]), text("Ann"), text(quoted), ints(0)]);
    assert_eq!(values(1), [ints(2), RecordValue::Missing, text("Bob; junior"), RecordValue::Missing, ints(2)]);
}

#[test]
fn a_first_column_without_a_name_is_an_index() {
    for (bytes, expected) in [
        (&b",a,b\n3,1,2\n1,2,3\n"[..], true),
        (b"\"\",a,b\nx,1,2\n", true),
        (b",,a\n0,x,1\n", true),
        (b"Unnamed: 0,a\n0,1\n", true),
        (b",a\n0.5,1\n", false),
        (b",Unnamed: 0,a\n0,7,1\n", true),
        (b"a,,b\n1,2,3\n", false),
        (b"column0,a\n1,2\n", false),
        (b"1,2\n3,4\n", false),
    ] {
        let (dir, reader) = opened(bytes, &[]);
        let stream = crate::formats::testing::open_stream(&dir.path().join("file.csv"), &[]).unwrap();
        for reader in [reader, stream] {
            assert_eq!(reader.is_index(0), expected, "{}", String::from_utf8_lossy(bytes));
            // Of several levels, all; after a column with a name, none.
            assert_eq!(reader.is_index(1), bytes.starts_with(b",Unnamed") || bytes.starts_with(b",,"));
        }
    }
}

#[test]
fn decimal_commas_are_read_with_a_key_or_refused_with_it() {
    let bytes = b"size;price;name\n1,5;2;a\n-2,25e1;3,5;b\n;4;1,5 or 2\n";
    let (dir, reader) = opened(bytes, &[("decimal", text(","))]);
    let stream = crate::formats::testing::open_stream(&dir.path().join("file.csv"), &[("decimal", text(","))]).unwrap();
    for reader in [reader, stream] {
        let real = RecordKind::Real { shape: vec![] };
        let kinds: Vec<_> = reader.columns().iter().map(|column| column.kind.clone()).collect();
        assert_eq!(kinds, [real.clone(), real, RecordKind::Text]);
        let value = |at, column| read(&*reader, at).value(column).clone();
        assert_eq!((value(0, 0), value(1, 0)), (RecordValue::Reals(vec![1.5]), RecordValue::Reals(vec![-22.5])));
        assert_eq!((value(2, 0), value(1, 1)), (RecordValue::Missing, RecordValue::Reals(vec![3.5])));
    }
    let quoted = b"size,price\n\"1,5\",2\n2,3\n";
    for (bytes, line) in [(&bytes[..], 2), (quoted, 2), (b"1,5;2\n1,6;3\n", 1)] {
        let (dir, random) = open_bytes(&FORMAT, bytes, &[]);
        let stream = crate::formats::testing::open_stream(&dir.path().join("file.csv"), &[]);
        for opened in [random, stream] {
            let error = read_error(opened);
            let start = format!("line {line}: column ");
            assert!(
                error.message.starts_with(&start) && error.message.contains("has \"1,5\", a number with a comma"),
                "{error}"
            );
            assert!(error.hint.starts_with("write `decimal = \",\"` under [data]"), "{error}");
        }
    }
    let (_dir, reader) = opened(quoted, &[("text", Setting::List(vec![text("size")]))]);
    assert_eq!((read(&*reader, 0).value(0), reader.columns()[1].kind.clone()), (&RecordValue::Text("1,5".into()), INT));
    // With a comma, a point is no part of a number: it may stand between thousands.
    let (_dir, reader) = opened(b"a;b\n1.234,5;1\n2.5;2\n", &[("decimal", text(","))]);
    assert_eq!(reader.columns()[0].kind, RecordKind::Text);
}

#[test]
fn delimiters_and_headers_are_guessed_or_given() {
    let tabs = open(&FORMAT, &[file("table.tsv")], &[]).unwrap();
    assert_eq!((names(&*tabs), tabs.len()), (vec!["column0", "column1", "column2"], 2));
    for (bytes, keys, expected, len) in [
        (&b"a;b\r\n1;2,5\r\n"[..], vec![("decimal", text(","))], vec!["a", "b"], 1),
        (b"1,5;2\n1,6;3\n", vec![("decimal", text(","))], vec!["column0", "column1"], 2),
        (b"a|b\n", vec![("delimiter", text(","))], vec!["a|b"], 0),
        (b"a b\n1 2\n", vec![("delimiter", text(" "))], vec!["a", "b"], 1),
        (b"x,y\nu,v", vec![("header", Setting::Bool(false))], vec!["column0", "column1"], 2),
        (b"1,2\n3,4\n", vec![("header", Setting::Bool(true))], vec!["1", "2"], 1),
        (b"\xef\xbb\xbfx,y\n1,2\n\n\n3,4\n\n", vec![], vec!["x", "y"], 2),
        (b",y\n0,2\n", vec![], vec!["column0", "y"], 1),
        (b"only\n1\n2\n", vec![], vec!["only"], 2),
        (b"a;b", vec![], vec!["a", "b"], 0),
    ] {
        let (_dir, reader) = opened(bytes, &keys);
        assert_eq!((names(&*reader), reader.len()), (expected, len), "{}", String::from_utf8_lossy(bytes));
        (0..len).for_each(|at| _ = read(&*reader, at));
    }
    let error = open_bytes(&FORMAT, b"a,b", &[("delimiter", text(";;"))]).1.unwrap_err().to_string();
    assert!(error.contains("`data.delimiter` is \";;\""), "{error}");
}

/// Numbers may be names, too: those that pandas gives to columns, and those of columns that `kolo data convert` wrote.
#[test]
fn headers_with_numbers_are_told_by_what_is_below() {
    for (text, is_header) in [
        ("0,1,label\n1.5,2,cat\n3,4,dog\n", true),
        ("0,1,label\n1.5,2,1\n2.5,3,0\n", true),
        ("year,2019,2020\n1,2,3\n", true),
        ("id,2019\nNA,2\n5,3\n", true),
        ("0,1,Class\n1,2,a\n1,2,b\n", true),
        ("0,1,y\n1,2,n\n1,2,y\n", false),
        ("1,2,cat\n3,4,dog\n", false),
        ("1,2,cat\n3,4,5\n3,4,dog\n", false),
        ("0,1,2\n3,4,5\n", false),
        ("0,1,label\n", false),
        ("1,NA,2\n3,4,5\n", false),
        ("0,1,word", false),
    ] {
        assert_eq!(scan::has_header(text.as_bytes(), b','), is_header, "{text}");
        let (dir, random) = open_bytes(&FORMAT, text.as_bytes(), &[]);
        let stream = crate::formats::testing::open_stream(&dir.path().join("file.csv"), &[]);
        let first = text.lines().next().unwrap().split(',').next().unwrap();
        for reader in [random, stream] {
            let reader = reader.unwrap();
            assert_eq!(names(&*reader)[0], if is_header { first } else { "column0" }, "{text}");
            assert_eq!(reader.len(), text.lines().count() - usize::from(is_header), "{text}");
        }
    }
}

#[test]
fn long_first_lines_tell_their_delimiter() {
    let line = |cell: &dyn Fn(usize) -> String| (0..20_000).map(cell).collect::<Vec<_>>().join(";") + "\n";
    let text = line(&|at| format!("column {at}")) + &line(&|at| at.to_string());
    assert!(text.len() > 4 * HEAD_BYTES);
    let (dir, random) = open_bytes(&FORMAT, text.as_bytes(), &[]);
    for reader in [random, crate::formats::testing::open_stream(&dir.path().join("file.csv"), &[])] {
        let reader = reader.unwrap();
        assert_eq!((reader.columns().len(), reader.len(), &reader.columns()[9].name[..]), (20_000, 1, "column 9"));
        assert_eq!(read(&*reader, 0).value(19_999), &RecordValue::Ints(vec![19_999]));
    }
}

#[test]
fn kinds_come_from_all_rows_of_all_files() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a,b,c,d\n1,1,1,\n", "a,b,c,d\n2,2.5,x,NA\n"].iter().enumerate().map(|(at, rows)| {
        let path = dir.path().join(format!("{at}.csv"));
        std::fs::write(&path, rows).unwrap();
        path
    });
    let paths: Vec<_> = paths.collect();
    let reader = open(&FORMAT, &paths, &[]).unwrap();
    let kinds: Vec<_> = reader.columns().iter().map(|column| column.kind.clone()).collect();
    let real = RecordKind::Real { shape: vec![] };
    assert_eq!(kinds, [INT, real.clone(), RecordKind::Text, real]);
    let first = read(&*reader, 0);
    assert_eq!(first.value(1), &RecordValue::Reals(vec![1.0]));
    assert_eq!((first.value(2), first.value(3)), (&RecordValue::Text("1".into()), &RecordValue::Missing));
    let reason = reader.kind_reason(2).unwrap();
    assert!(reason.ends_with("1.csv, line 2: \"x\" is not a number"), "{reason}");
    assert_eq!((reader.kind_reason(0), reader.kind_reason(9)), (None, None));
    std::fs::write(&paths[1], "a,b\n1,2\n").unwrap();
    let error = read_error(open(&FORMAT, &paths, &[])).to_string();
    assert!(
        error.contains("1.csv") && error.contains("its columns are a, b, but those of the first file are a, b, c, d")
    );
}

#[test]
fn a_bad_line_is_an_error_of_its_own() {
    let (_dir, reader) = opened(b"a,b\r\n1,2\r\n\r\n\"3\n\",4\r\n5\r\n6,7,8\r\n9,\xff\r\n", &[]);
    assert_eq!(reader.len(), 5);
    let error = |at| reader.read(at, &mut Record::new()).unwrap_err();
    assert_eq!(read(&*reader, 1).value(0), &RecordValue::Ints(vec![3]));
    assert!(error(2).message.starts_with("line 6: the line has 1 cells, but there are 2 columns"), "{}", error(2));
    assert!(error(3).message.starts_with("line 7: the line has more cells"), "{}", error(3));
    assert!(error(4).message.starts_with("line 8: column \"b\" is not UTF-8 text"), "{}", error(4));
    assert!(error(4).offset.is_some() && error(4).file.is_some());
    let (_dir, reader) = opened(b"a\n1.5\n1e60\n", &[]);
    let error = reader.read(1, &mut Record::new()).unwrap_err();
    assert!(error.message.contains("has 1e60, which is too large for 32 bits"), "{error}");
}

#[test]
fn wrong_files_are_refused() {
    for (bytes, expected) in [
        (&b""[..], "it is empty"),
        (b"\n\n", "it is empty"),
        (b"a,a\n1,2\n", "two columns are called \"a\""),
        (b"a,\xff\n1,2\n", "the name of column 1 is not UTF-8 text"),
    ] {
        let error = read_error(open_bytes(&FORMAT, bytes, &[]).1);
        assert!(error.message.contains(expected) && error.file.is_some(), "{error}");
    }
    let error = read_error(open_bytes(&FORMAT, b"a,\"b\n\xff\"\n1,2\n", &[]).1);
    assert!(error.offset == Some(5) && error.hint.contains("UTF-8"), "{error}");
    let open_quote = [b"a,b\n1,2\n3,\"", &vec![b'x'; scan::RECORD_BYTES_MAX + 10][..]].concat();
    let error = read_error(open_bytes(&FORMAT, &open_quote, &[]).1);
    assert!(error.message.starts_with("line 3: ") && error.hint.contains("quote"), "{error}");
    for (bytes, offset) in
        [(&b"a,b,label\n1,2,\"x\n3,4,y\n5,6,z\n"[..], 14), (b"a,b\n1,\"x\"\"y\n", 6), (b"a,b\n\"1\",2\n\"", 10)]
    {
        let error = read_error(open_bytes(&FORMAT, bytes, &[]).1);
        assert!(error.message.ends_with(": the file ends inside a quoted cell"), "{error}");
        assert_eq!(error.offset, Some(offset), "{error}");
    }
    // Quotes inside a cell that does not start with one are letters.
    assert_eq!(opened(b"a,b\n1,2\"3\n5\",6\n", &[]).1.len(), 2);
    // Empty lines are no way to make a record large either.
    let empty_lines = [b"a,b\n1,2\n", &vec![b'\n'; 2 * scan::RECORD_BYTES_MAX + 10][..]].concat();
    assert_eq!(opened(&empty_lines, &[]).1.len(), 1);
    let error = read_error(open_bytes(&FORMAT, &[&empty_lines, &b"3,4"[..]].concat(), &[]).1);
    assert!(error.message.contains("its record has more than"), "{error}");
}

#[test]
fn damaged_files_are_read_or_refused() {
    survive_damage(&FORMAT, &std::fs::read(file("table.csv")).unwrap(), &[]);
}
