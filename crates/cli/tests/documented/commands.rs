//! Every command line of the documents runs, with the files that its page names, and ends as the page says.
//!
//! A page's lines run one after the other in one directory, as a reader would type them. A code block of the kind `console` has
//! a command in each line that begins with `$ `; a here-document writes its file. A line whose output in the page begins with
//! `error: ` must fail so, every other must succeed.

use crate::KOLO;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// A page, and what makes the files that it takes as given.
struct Page {
    file: &'static str,
    /// Files that stand for the placeholders of its lines: the jobs and clusters that it recommends.
    given: &'static [(&'static str, &'static str)],
    /// Command lines that another page has told the reader to run before.
    before: &'static [&'static str],
}

const DIGITS: &str = "examples/digits.toml";
const CLUSTER: &str = "examples/clusters/h100.toml";
const SHAPES: &[&str] = &["python3 examples/make_images.py shapes"];

const PAGES: &[Page] = &[
    Page { file: "README.md", given: &[("JOB.toml", DIGITS)], before: &[] },
    Page {
        file: "docs/guide.md",
        given: &[("JOB.toml", DIGITS)],
        before: &[
            "kolo train",
            "python3 examples/make_csv.py flowers.csv",
            "python3 examples/make_images.py shapes",
            "kolo train examples/images.toml",
            "python3 examples/make_text.py stories.txt",
            "kolo data tokens train --vocab 512 --out stories.json stories.txt",
            "kolo data tokens apply --tokenizer stories.json --out stories.bin stories.txt",
            "kolo train examples/text.toml --out runs/stories",
        ],
    },
    Page { file: "docs/checkpoint.md", given: &[], before: &[] },
    Page { file: "docs/data.md", given: &[("JOB.toml", DIGITS)], before: SHAPES },
    Page { file: "docs/elastic.md", given: &[("job.toml", DIGITS)], before: &[] },
    Page {
        file: "docs/gpu.md",
        given: &[("job.toml", DIGITS)],
        before: &["python3 examples/make_images.py shapes", "kolo train examples/images.toml --out runs/a"],
    },
    Page { file: "docs/mpi.md", given: &[], before: &[] },
    Page { file: "docs/own-crate.md", given: &[], before: &[] },
    Page { file: "docs/parallelism.md", given: &[], before: &[] },
    Page { file: "docs/planning.md", given: &[], before: &[] },
    Page {
        file: "docs/simulation.md",
        given: &[("JOB.toml", "examples/clusters/gpt-large.toml"), ("cluster.toml", CLUSTER)],
        before: &[],
    },
    Page { file: "docs/tokens.md", given: &[], before: &[] },
];

/// Pages whose commands another test runs, which compares what they print as well.
const ELSEWHERE: &[&str] = &["docs/predict-a-paper.md"];

/// Words that make a line shorter to run, behind those that begin with these. All that match are added.
const SHORTER: &[(&str, &str)] = &[
    ("kolo train ", "--set train.steps=4"),
    ("kolo train JOB.toml --device reference", "--set data.batch=8 --set train.steps=1 --set data.holdout=0"),
    // The nearest layouts of twelve layers are looked for as long as those of two, ten seconds.
    ("kolo train gpt12.toml", "--set model.layers=2 --set memory.limit=70MiB"),
    // The machine may have the memory.
    ("kolo train wide.toml", "--set memory.limit=20GiB"),
    ("kolo train JOB.toml --auto", "-n 2"),
    ("kolo train examples/digits.toml --auto", "-n 2"),
    ("kolo bench comm", "--op all_reduce --bytes 4,64K --iterations 8"),
    ("kolo bench published", "--only BERT"),
    ("kolo data bench", "--seconds 0.1"),
    ("kolo data tokens apply", "--overwrite"),
    ("kolo data tokens train", "--overwrite"),
    ("kolo plan examples/clusters/gpt-large.toml", "--set model.layers=8"),
    ("kolo plan JOB.toml -n 64 --device h100", "--set model.layers=8"),
];

/// Lines that cannot run as they are, by words that they contain, and why: what runs instead of those words, or nothing.
const OTHERWISE: &[(&str, Option<&str>, &str)] = &[
    ("cargo ", None, "builds this very program"),
    ("generate-samples |", None, "stands for a program of the user's"),
    ("mpirun -n 1 kolo train JOB.toml :", None, "needs MPI; `together` runs it"),
    ("mpirun -n 4 kolo train", Some("kolo train -n 4"), "needs MPI; `together` runs it"),
    ("srun -n 4 kolo train", Some("kolo train -n 4"), "needs Slurm; `together` runs it"),
    (
        "kolo train JOB.toml --hosts",
        Some("kolo plan JOB.toml --by-rates --hosts"),
        "needs two hosts; `together` has them",
    ),
];

/// Lines that need a GPU: without one they must fail for that reason alone.
const GPU: &[&str] =
    &["--device cuda", "--nccl", "--transport nccl", "memory.offload=", "kolo train job.toml --device"];
const GPU_WORDS: &[&str] = &["GPU", "CUDA", "cuda", "NCCL", "NVRTC", "memory.offload"];

/// A command line and whether its page says that it fails.
#[derive(Debug)]
struct Line {
    number: usize,
    text: String,
    fails: bool,
}

/// A file that a here-document of the page writes, before the line of this number.
struct Written {
    number: usize,
    name: String,
    text: String,
}

/// A line without the comment behind it.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, letter) in line.char_indices() {
        match (quote, letter) {
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            (None, '#') if before == ' ' => return line[..at].trim_end(),
            _ => {}
        }
        before = letter;
    }
    line.trim_end()
}

fn commands_of(text: &str) -> (Vec<Line>, Vec<Written>) {
    let (mut lines, mut written): (Vec<Line>, Vec<Written>) = (Vec::new(), Vec::new());
    let (mut in_console, mut in_block, mut here): (bool, bool, Option<Written>) = (false, false, None);
    for (number, line) in text.lines().enumerate().map(|(at, line)| (at + 1, line)) {
        if line.starts_with("```") {
            in_console = !in_block && line == "```console";
            in_block = !in_block;
            continue;
        }
        if let Some(file) = &mut here {
            match line {
                "END" => written.extend(here.take()),
                line => file.text += &format!("{line}\n"),
            }
            continue;
        }
        assert!(
            !in_block || in_console || !(line.starts_with("$ ") || line.starts_with("kolo ") && line.contains(" --")),
            "line {number}: `{line}` stands in a block that is not of the kind `console`"
        );
        let command = line.strip_prefix("$ ").filter(|_| in_console);
        match (command, lines.last_mut()) {
            (Some(command), _) => match command.strip_prefix("cat > ").and_then(|rest| rest.strip_suffix(" <<'END'")) {
                Some(name) => here = Some(Written { number, name: name.into(), text: String::new() }),
                None => lines.push(Line { number, text: without_comment(command).into(), fails: false }),
            },
            (None, Some(last)) if in_console && line.starts_with("error: ") => last.fails = true,
            _ => {}
        }
    }
    (lines, written)
}

/// What runs in place of a line; `None` if nothing does.
fn shortened(text: &str) -> Option<String> {
    let other = OTHERWISE.iter().find(|(words, ..)| text.contains(words));
    let text = match other {
        Some((_, None, _)) => return None,
        Some((words, Some(instead), _)) => text.replace(words, instead),
        None => text.to_string(),
    };
    // Words go before the pipe or what is passed on.
    let (command, rest) = text.split_once(" | ").unwrap_or((&text, ""));
    let added = SHORTER.iter().filter(|(begin, _)| format!("{command} ").starts_with(begin));
    let command = added.fold(command.to_string(), |text, (_, words)| format!("{text} {words}"));
    Some(if rest.is_empty() { command } else { format!("{command} | {rest}") })
}

fn run(dir: &Path, text: &str) -> Output {
    let path = std::env::var("PATH").unwrap_or_default();
    let bin = Path::new(KOLO).parent().expect("the directory of the binary");
    let mut command = Command::new("bash");
    command.current_dir(dir).args(["-o", "pipefail", "-c", text]);
    command.env("PATH", format!("{}:{path}", bin.display())).output().expect("bash runs")
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// What is wrong with the lines of a page.
fn wrong_on(page: &Page) -> Vec<String> {
    let (root, dir) = (root(), TempDir::new().expect("a directory"));
    let dir = dir.path();
    for shared in ["examples", "bench", "crates", "docs"] {
        std::os::unix::fs::symlink(root.join(shared), dir.join(shared)).expect("a link");
    }
    for (name, from) in page.given {
        std::fs::copy(root.join(from), dir.join(name)).expect("a copy");
    }
    let text = std::fs::read_to_string(root.join(page.file)).expect("a page");
    let (lines, written) = commands_of(&text);
    let mut wrong = Vec::new();
    for before in page.before {
        let short = shortened(before).expect("a command");
        let output = run(dir, &short);
        assert!(output.status.success(), "{short}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for line in &lines {
        for file in written.iter().filter(|file| file.number < line.number) {
            std::fs::write(dir.join(&file.name), &file.text).expect("a file");
        }
        let Some(short) = shortened(&line.text) else { continue };
        let output = run(dir, &short);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let succeeded = output.status.success();
        let lacks_gpu = GPU.iter().any(|words| line.text.contains(words))
            && matches!(output.status.code(), Some(1 | 2))
            && said.lines().any(|line| line.starts_with("error: "))
            && GPU_WORDS.iter().any(|word| said.contains(word));
        let as_written = if line.fails { said.contains("error: ") && !succeeded } else { succeeded || lacks_gpu };
        if !as_written {
            wrong.push(format!(
                "{}:{}: $ {}\n  run as: {short}\n  {}\n{said}",
                page.file, line.number, line.text, output.status
            ));
        }
    }
    wrong
}

#[test]
fn every_command_line_of_the_documents_runs() {
    if !has("bash") || !has("python3") {
        println!("skipped: the command lines need bash and python3");
        return;
    }
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = PAGES.iter().map(|page| scope.spawn(move || wrong_on(page))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a page")).collect()
    });
    assert!(wrong.is_empty(), "{} lines do not run as written:\n{}", wrong.len(), wrong.join("\n"));
}

/// A page that is not in the table has no command lines, and no rule is left of lines that are gone.
#[test]
fn every_page_and_every_rule_is_looked_at() {
    let mut texts = String::new();
    let mut pages: Vec<String> = vec!["README.md".into()];
    let docs =
        std::fs::read_dir(root().join("docs")).expect("the documents").map(|entry| entry.expect("an entry").path());
    pages.extend(
        docs.filter(|path| path.extension().is_some_and(|ending| ending == "md"))
            .map(|path| format!("docs/{}", path.file_name().expect("a name").to_string_lossy())),
    );
    let mut count = 0;
    for page in &pages {
        let (lines, _) = commands_of(&std::fs::read_to_string(root().join(page)).expect("a page"));
        let is_known = PAGES.iter().any(|known| known.file == page) || ELSEWHERE.contains(&page.as_str());
        assert!(lines.is_empty() || is_known, "{page} is in no list here");
        count += lines.len();
        texts.extend(lines.iter().map(|line| format!("{} \n", line.text)));
    }
    assert!(count > 80, "{count} command lines");
    for page in PAGES {
        texts.extend(page.before.iter().map(|line| format!("{line} \n")));
    }
    for (begin, _) in SHORTER {
        assert!(texts.lines().any(|line| line.starts_with(begin)), "no command line begins with `{begin}`");
    }
    for (words, _, why) in OTHERWISE {
        assert!(texts.contains(words), "no command line contains `{words}` ({why})");
    }
    assert_eq!(
        without_comment("kolo train --set 'a=\"#\"' --quiet   # a comment"),
        "kolo train --set 'a=\"#\"' --quiet"
    );
}
