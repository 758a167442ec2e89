use super::*;
use crate::record::RecordValue;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

fn image_file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files/packed/images/one.png")
}

/// A directory with copies of an image under these names.
fn folder(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(image_file(), path).unwrap();
    }
    directory
}

fn settings() -> Settings {
    Settings::new("data", "job.toml:1")
}

fn open_paths(paths: &[&Path]) -> OpenedFiles {
    let files: Vec<DataFile> = paths.iter().map(|path| DataFile::at(path).unwrap()).collect();
    open(&files, &settings())
}

fn classes(reader: &dyn Reader) -> (Vec<String>, Vec<i64>) {
    let RecordKind::Class { names } = &reader.columns()[1].kind else { panic!("{:?}", reader.columns()) };
    let mut record = Record::new();
    let mut labels = Vec::new();
    for at in 0..reader.len() {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Bytes(fs::read(image_file()).unwrap()));
        let RecordValue::Ints(label) = record.value(1) else { panic!("{record:?}") };
        labels.extend(label);
    }
    (names.to_vec(), labels)
}

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

#[test]
fn folders_are_classes_in_the_order_of_their_names() {
    let names = ["dog/1.png", "dog/deep/2.JPG", "cat/3.jpeg", "cat/.hidden.png", "cat/notes.txt", ".git/x.png"];
    let directory = folder(&names);
    assert!(sniff(directory.path(), b""));
    let reader = open_paths(&[directory.path()]).unwrap();
    assert_eq!(classes(&*reader), (texts(&["cat", "dog"]), vec![0, 1, 1]));
    let again = open_paths(&[directory.path()]).unwrap();
    assert_eq!(reader.fingerprint(), again.fingerprint());
    fs::rename(directory.path().join("cat/3.jpeg"), directory.path().join("cat/4.jpeg")).unwrap();
    assert_ne!(reader.fingerprint(), open_paths(&[directory.path()]).unwrap().fingerprint());
    // The file that was there has gone.
    let error = reader.read(0, &mut Record::new()).unwrap_err();
    assert!(error.file.is_some_and(|file| file.ends_with("cat/3.jpeg")));
    // A second directory with another class between the two.
    let more = folder(&["cow/1.png", "cat/1.png"]);
    let both = open_paths(&[directory.path(), more.path()]).unwrap();
    assert_eq!(classes(&*both), (texts(&["cat", "cow", "dog"]), vec![0, 2, 2, 0, 1]));
}

#[test]
fn a_single_class_is_one_and_a_flat_folder_has_none() {
    let directory = folder(&["only/1.png"]);
    assert_eq!(classes(&*open_paths(&[directory.path()]).unwrap()), (texts(&["only"]), vec![0]));
    let flat = open_paths(&[&directory.path().join("only")]).unwrap();
    assert_eq!((flat.columns().len(), flat.len()), (1, 1));
    let loose = folder(&["a/1.png", "2.png"]);
    let error = open_paths(&[loose.path()]).unwrap_err().to_string();
    assert!(error.contains("2.png") && error.contains("in no class"), "{error}");
    let none = folder(&[]);
    assert!(!sniff(none.path(), b""));
    assert!(open_paths(&[none.path()]).unwrap_err().to_string().contains("names no image"));
}

#[test]
fn files_of_a_pattern_have_their_folders_as_classes() {
    let directory = folder(&["b/1.png", "a/1.png", "a/2.png"]);
    let path = |name: &str| directory.path().join(name);
    let (first, second, third) = (path("b/1.png"), path("a/1.png"), path("a/2.png"));
    let reader = open_paths(&[&first, &second, &third]).unwrap();
    assert_eq!(classes(&*reader), (texts(&["a", "b"]), vec![1, 0, 0]));
    assert_eq!(open_paths(&[&second, &third]).unwrap().columns().len(), 1);
    assert_eq!(classes(&*open_paths(&[&path("b"), &path("a")]).unwrap()), (texts(&["a", "b"]), vec![1, 0, 0]));
}

#[test]
fn pipes_and_empty_files_are_errors() {
    let directory = folder(&["a/1.png"]);
    fs::write(directory.path().join("a/2.png"), b"").unwrap();
    let pipe = directory.path().join("a/3.png");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    let reader = open_paths(&[directory.path()]).unwrap();
    let mut record = Record::new();
    assert!(reader.read(1, &mut record).unwrap_err().message.contains("empty"));
    if made.is_ok_and(|status| status.success()) {
        assert!(reader.read(2, &mut record).unwrap_err().message.contains("not a regular file"));
    }
    assert!(reader.read(0, &mut record).is_ok());
}

#[test]
fn a_directory_is_told_by_the_images_below_it() {
    assert!(sniff(folder(&["a/b/c/1.png"]).path(), b""));
    assert!(!sniff(folder(&["a/b/c/1.txt"]).path(), b""));
}

#[test]
fn circles_of_links_end() {
    let directory = folder(&["a/1.png", "b/2.png"]);
    let path = |name: &str| directory.path().join(name);
    symlink(directory.path(), path("a/up")).unwrap();
    symlink("self", path("a/self")).unwrap();
    symlink("nowhere", path("b/broken.png")).unwrap();
    let reader = open_paths(&[directory.path()]).unwrap();
    // a/1, b/2 and b/broken. By a/up nothing of b gets the label of a.
    assert_eq!(reader.len(), 3);
    let mut record = Record::new();
    assert_eq!((0..3).filter(|at| reader.read(*at, &mut record).is_err()).count(), 1);
    // An image cannot be of two classes.
    symlink(path("b"), path("a/other")).unwrap();
    let error = open_paths(&[directory.path()]).unwrap_err().to_string();
    assert!(error.contains("b: this folder is") && error.contains("a/other, of another class"), "{error}");
}

#[test]
fn a_folder_that_several_links_lead_to_is_read_once() {
    let directory = folder(&["a/1.png", "a/2.png", "b/1.png", "store/3.png"]);
    let (path, root) = (|name: &str| directory.path().join(name), directory.path().join("classes"));
    fs::create_dir(&root).unwrap();
    symlink(path("a"), root.join("a")).unwrap();
    symlink(path("b"), root.join("b")).unwrap();
    symlink(path("store"), path("a/first")).unwrap();
    symlink(path("store"), path("a/second")).unwrap();
    symlink(&root, path("b/up")).unwrap();
    let reader = open_paths(&[&root]).unwrap();
    assert_eq!(classes(&*reader), (texts(&["a", "b"]), vec![0, 0, 0, 1]));
    assert_eq!(reader.notes(), ["left out: folders that links lead to a second time"]);
}

#[test]
fn a_class_without_an_image_is_refused_and_other_files_are_counted() {
    let directory = folder(&["cat/1.png", "dog/1.png", "dog/2.txt", "dog/3.txt", "cat/deep/4.json", "README.md"]);
    let path = |name: &str| directory.path().join(name);
    let reader = open_paths(&[directory.path()]).unwrap();
    let root = directory.path().display();
    assert_eq!(reader.notes(), [format!("left out: 4 files (.txt 2, .json 1, .md 1) in {root}: not images")]);
    fs::create_dir(path("owl")).unwrap();
    let refused = || open_paths(&[directory.path()]).unwrap_err().to_string();
    assert!(refused().contains("owl: the folder of a class is empty"), "{}", refused());
    fs::write(path("owl/1.tiff"), b"II*\0").unwrap();
    fs::write(path("owl/2.tiff"), b"II*\0").unwrap();
    assert!(
        refused().contains("owl: the folder of a class has no image that is read, but 2 files (.tiff 2)"),
        "{}",
        refused()
    );
    assert!(refused().contains("hint: convert them, with `mogrify -format png`"), "{}", refused());
    fs::remove_dir_all(path("owl")).unwrap();
    fs::create_dir(path("owl")).unwrap();
    for (name, from) in [("1.webp", "lossless.webp"), ("2.gif", "palette.gif")] {
        fs::copy(image_file().with_file_name(from), path("owl").join(name)).unwrap();
    }
    let reader = open_paths(&[directory.path()]).unwrap();
    assert_eq!(
        (reader.len(), reader.columns()[1].kind.clone()),
        (4, RecordKind::Class { names: texts(&["cat", "dog", "owl"]).into() })
    );
}

#[test]
fn a_folder_without_data_is_said_to_be_one() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("cats")).unwrap();
    fs::write(directory.path().join("cats/notes.xyz"), "no image").unwrap();
    let files = [DataFile::at(directory.path()).unwrap()];
    let error = crate::format::choose(&files, &crate::formats::testing::settings(&[])).unwrap_err().to_string();
    assert!(error.contains("a folder in which no data are found") && error.contains(".png"), "{error}");
}

#[test]
fn labels_of_a_flat_folder_come_from_a_file() {
    let directory = folder(&["1.png", "2.png", "3.png"]);
    let labelled = |text: &str| {
        fs::write(directory.path().join("labels.csv"), text).unwrap();
        open_paths(&[directory.path()])
    };
    let reader = labelled("file,label\n3.png,dog\n1.png,\"cat, big\"\n").unwrap();
    assert_eq!(classes(&*reader), (texts(&["cat, big", "dog"]), vec![1, 0]));
    let mut record = Record::new();
    let numbers = labelled("id,y\n1.png,10\n2.png, 2\n").unwrap();
    assert_eq!(numbers.columns()[1].kind, RecordKind::Int { shape: vec![], classes: Some(11) });
    numbers.read(1, &mut record).unwrap();
    assert_eq!(record.value(1), &RecordValue::Ints(vec![2]));
    let reals = labelled("id,y\n1.png,10\n2.png,0.5\n").unwrap();
    assert_eq!(reals.columns()[1].kind, RecordKind::Real { shape: vec![] });
    reals.read(1, &mut record).unwrap();
    assert_eq!(record.value(1), &RecordValue::Reals(vec![0.5]));
    for (text, message, offset) in [
        ("a,b\n1.png,x\n../2.png,y\n", "not the name of a file", 12),
        ("a,b\n/etc/passwd,x\n", "not the name of a file", 4),
        ("a,b\nabsent.png,x\n", "no file \"absent.png\"", 4),
        ("a,b\n1.png\n", "fewer than two", 4),
        ("1.png,cat\n2.png,dog\n", "line 1: a header is expected, but \"1.png\" is an image", 0),
        ("a,b\n1.png,x\n2.png, \n", "line 3: the label of \"2.png\" is empty", 12),
        ("a,b\n1.png,x\n2.png,y\n1.png,x\n", "line 4: \"1.png\" has a second label", 20),
    ] {
        let Err(OpenError::Read(error)) = labelled(text) else { panic!("{text}") };
        assert!(error.message.contains(message), "{error}");
        assert_eq!(error.offset, Some(offset), "{error}");
    }
    for text in ["", "name,label\n"] {
        let error = labelled(text).unwrap_err().to_string();
        assert!(error.contains("has a `labels.csv` that names no image"), "{error}");
    }
    // Images without a label are left out.
    let one = labelled("a,b\n2.png,x\n").unwrap();
    let note = format!("left out: 2 images in {} that labels.csv does not name", directory.path().display());
    assert_eq!((one.len(), one.notes()), (1, vec![note]));
    assert!(labelled("a,b\n").is_err());
    fs::write(directory.path().join("labels.csv"), b"a,b\n1.png,\xff\n").unwrap();
    assert!(open_paths(&[directory.path()]).unwrap_err().to_string().contains("UTF-8"));
}
