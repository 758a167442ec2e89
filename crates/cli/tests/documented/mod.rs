//! The documents say what the program says.

mod commands;

use std::path::Path;

const ERRORS: &str = include_str!("../../../../docs/errors.md");
/// Words in capitals that a message contains; others stand for a name or a number.
const ACRONYMS: &[&str] = &["CUDA", "MPI", "NVIDIA", "TOML", "UTF"];

/// A document's text or a source file, so that one can be found in the other: one kind of quote, one space between words, no
/// continued lines, and `…` for each placeholder.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        let placeholder = (first == '{').then(|| after.split_once('}').map(|(inside, _)| inside)).flatten();
        let placeholder = placeholder.filter(|inside| !inside.contains([' ', '\n', '{']));
        rest = after;
        if let Some(inside) = placeholder {
            plain.push('…');
            rest = &after[inside.len() + 1..];
        } else if first == '\\' && after.starts_with('\n') {
            rest = after.trim_start();
        } else if first.is_whitespace() {
            plain.push_str(if plain.ends_with(' ') { "" } else { " " });
        } else if first != '\\' {
            plain.push(if "`'\"".contains(first) { '\'' } else { first });
        }
    }
    plain
}

/// The parts of a message between its placeholders, those of two words or more.
fn parts(message: &str) -> Vec<String> {
    let is_part_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let message = plain(message);
    let mut open = String::new();
    for word in message.split_inclusive(|letter| !is_part_of_word(letter)) {
        let name = word.trim_end_matches(|letter| !is_part_of_word(letter));
        let stands_for_another = name.chars().all(|letter| letter.is_ascii_uppercase()) && !ACRONYMS.contains(&name);
        match !name.is_empty() && stands_for_another {
            true => open.extend(["…", &word[name.len()..]]),
            false => open.push_str(word),
        }
    }
    let trimmed = open.split('…').map(|part| part.trim_matches([' ', '\'', ':', ';', ',']).to_string());
    trimmed.filter(|part| part.contains(' ')).collect()
}

/// The lines of all source files that have text in quotes.
fn sources(folder: &Path, found: &mut String) {
    for path in std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let mut continues = false;
            let has_text = |line: &&str| {
                let continued = std::mem::replace(&mut continues, line.ends_with("\\\n"));
                continued || line.contains('"')
            };
            found.extend(text.split_inclusive('\n').filter(has_text));
        }
    }
}

/// Every message that docs/errors.md quotes is one that a crate prints.
#[test]
fn quoted_messages_are_in_the_source() {
    let mut source = String::new();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut source);
    }
    let source = plain(&source);
    let visible = ERRORS.split("## What a user can see").nth(1).and_then(|text| text.split("\n## ").next()).unwrap();
    let quoted = visible.split('`').skip(1).step_by(2).filter(|text| text.contains(' ') && !text.starts_with("kolo "));
    let quoted: Vec<&str> = quoted.collect();
    assert!(quoted.len() > 100, "{} messages", quoted.len());
    let unknown = |message: &&&str| parts(message).iter().any(|part| !source.contains(part));
    let unknown: Vec<&&str> = quoted.iter().filter(unknown).collect();
    assert!(unknown.is_empty(), "no crate says {unknown:#?}");
}

const OWN_CRATE: &str = include_str!("../../../../docs/own-crate.md");

/// The block of a page that begins with this word behind its fence.
fn block<'p>(page: &'p str, kind: &str, number: usize) -> &'p str {
    let inside = page.split("```").skip(1).step_by(2);
    let mut of_kind = inside.filter_map(|block| block.strip_prefix(kind)?.strip_prefix('\n'));
    of_kind.nth(number).unwrap_or_else(|| panic!("no block {number} of {kind}"))
}

/// A crate outside this workspace as the page has it, with this checkout beside it.
fn own_crate(dir: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = block(OWN_CRATE, "toml", 0).replace("../kolo/crates/cli", here.to_str().expect("a path in UTF-8"));
    std::fs::create_dir(dir.join("src")).unwrap();
    std::fs::write(dir.join("Cargo.toml"), manifest).unwrap();
    std::fs::write(dir.join("src/main.rs"), block(OWN_CRATE, "rust", 0)).unwrap();
    std::fs::write(dir.join("job.toml"), block(OWN_CRATE, "toml", 1)).unwrap();
    std::fs::copy(here.join("../../Cargo.lock"), dir.join("Cargo.lock")).unwrap();
}

fn cargo(dir: &Path, words: &[&str]) -> std::process::Output {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    std::process::Command::new(cargo).current_dir(dir).args(words).arg("--offline").output().expect("cargo runs")
}

/// Its program is an example, which is built and run; Cargo takes its manifest; and its profiles are the workspace's.
#[test]
fn a_crate_of_ones_own_is_as_documented() {
    assert_eq!(block(OWN_CRATE, "rust", 0), include_str!("../../../../examples/own_model.rs"));
    let dir = tempfile::tempdir().unwrap();
    own_crate(dir.path());
    let output = cargo(dir.path(), &["tree", "--prefix", "none", "--format", "{p}"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let packages: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    let manifests = [block(OWN_CRATE, "toml", 0), include_str!("../../../../Cargo.toml")];
    let packages_of = |profile: &str| {
        let table = |text: &str| {
            let profiles = kolo_config::parse(text, "Cargo.toml").unwrap().table("profile").unwrap();
            profiles.table(profile).unwrap().table("package").unwrap()
        };
        manifests.map(table)
    };
    let [own, workspace] = packages_of("release");
    assert_eq!(own.keys().collect::<Vec<_>>(), workspace.keys().collect::<Vec<_>>());
    for profile in ["release", "dev"] {
        let [own, workspace] = packages_of(profile);
        for package in own.keys() {
            assert!(packages.contains(&package), "{package} is no dependency of kolo");
            let [own, workspace] = [&own, &workspace].map(|tables| {
                let table = tables.table(package).unwrap();
                table.keys().map(|key| (key.to_string(), table.peek(key).cloned())).collect::<Vec<_>>()
            });
            assert_eq!(own, workspace, "{profile}: {package}");
        }
    }
}

/// The whole build, which takes minutes: `cargo test -p kolo --test cli -- --ignored a_crate_of_ones_own_builds`.
#[test]
#[ignore = "builds every dependency again"]
fn a_crate_of_ones_own_builds() {
    let dir = tempfile::tempdir().unwrap();
    own_crate(dir.path());
    let output = cargo(dir.path(), &["build", "--quiet", "--target-dir", "target"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = dir.path().join("target/debug/my-models");
    let output = std::process::Command::new(program)
        .current_dir(dir.path())
        .args(["train", "job.toml", "--no-out"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
