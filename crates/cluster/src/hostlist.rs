//! Lists of hosts as Slurm and people write them: `node[01-03,07]`, `gpu-[1-2]x[3-4]`, `a:2,b:2`, and counts as
//! `2(x3),1`.
//!
//! `scontrol show hostnames` is the oracle for what it accepts. Results are limited in number before anything is
//! expanded, and errors name the position.

use kolo_comm::Fault;
use std::collections::BTreeMap;

/// Most hosts in one list.
pub const HOSTS_MAX: usize = 1 << 16;
/// Longest host name.
pub const HOST_BYTES_MAX: usize = 255;

/// A host and the number of workers on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    pub host: String,
    pub count: usize,
}

/// Expands a list; names keep their order and may repeat.
pub fn hosts(text: &str) -> Result<Vec<String>, Fault> {
    Ok(items(text)?.into_iter().map(|item| item.host).collect())
}

/// Expands a list whose items may end in `:count`; without one it is 1. Items of the same host are added up.
pub fn slots(text: &str) -> Result<Vec<Slots>, Fault> {
    let mut all: Vec<Slots> = Vec::new();
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    for item in items(text)? {
        let at = *known.entry(item.host.clone()).or_insert(all.len());
        if at == all.len() {
            all.push(Slots { host: item.host, count: 0 });
        }
        all[at].count = all[at].count.saturating_add(item.count.unwrap_or(1));
    }
    let total = all.iter().fold(0usize, |sum, slots| sum.saturating_add(slots.count));
    if all.iter().any(|slots| slots.count == 0) || !(1..=HOSTS_MAX).contains(&total) {
        return Err(Fault::BadCall(format!(
            "the host list {text:?} has {total} workers; each host needs at least one, and at most {HOSTS_MAX} are supported"
        )));
    }
    Ok(all)
}

/// Expands `2(x3),1` to one count per node.
pub fn tasks_per_node(text: &str) -> Result<Vec<usize>, Fault> {
    let mut counts = Vec::new();
    let mut cursor = HostlistCursor { text, at: 0 };
    loop {
        let count = cursor.number()?;
        let mut times = 1;
        if cursor.skip(b'(') {
            cursor.expect(b'x')?;
            times = cursor.number()?;
            cursor.expect(b')')?;
        }
        if times > HOSTS_MAX - counts.len() {
            return Err(cursor.error("more than 65536 nodes"));
        }
        counts.resize(counts.len() + times, count);
        if cursor.at == text.len() {
            return Ok(counts);
        }
        cursor.expect(b',')?;
    }
}

struct HostItem {
    host: String,
    count: Option<usize>,
}

/// A piece of an item: text, or the numbers of a bracket.
enum NamePart {
    Text(String),
    Ranges(Vec<Range>),
}

/// Numbers from `first` to `last`, padded with zeros to `width`.
struct Range {
    first: usize,
    last: usize,
    width: usize,
}

struct HostlistCursor<'a> {
    text: &'a str,
    at: usize,
}

impl HostlistCursor<'_> {
    fn error(&self, why: &str) -> Fault {
        Fault::BadCall(format!("the list {:?} at position {}: {why}", self.text, self.at + 1))
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), Fault> {
        if self.skip(byte) { Ok(()) } else { Err(self.error(&format!("expected {:?}", byte as char))) }
    }

    fn number(&mut self) -> Result<usize, Fault> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        let parsed = self.text[start..self.at].parse();
        parsed.map_err(|_| {
            self.at = start;
            self.error("expected a number")
        })
    }

    fn range(&mut self) -> Result<Range, Fault> {
        let start = self.at;
        let first = self.number()?;
        let width = self.at - start;
        let last = if self.skip(b'-') { self.number()? } else { first };
        if last < first || last - first >= HOSTS_MAX || width > HOST_BYTES_MAX {
            self.at = start;
            return Err(self.error("a range that is backwards or too long"));
        }
        Ok(Range { first, last, width })
    }

    fn ranges(&mut self) -> Result<Vec<Range>, Fault> {
        let mut ranges = vec![self.range()?];
        while self.skip(b',') {
            ranges.push(self.range()?);
        }
        self.expect(b']')?;
        Ok(ranges)
    }

    /// The pieces up to the next comma, colon or end.
    fn pieces(&mut self) -> Result<Vec<NamePart>, Fault> {
        let mut pieces = Vec::new();
        loop {
            let start = self.at;
            while self.peek().is_some_and(|byte| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte)) {
                self.at += 1;
            }
            if self.at > start {
                pieces.push(NamePart::Text(self.text[start..self.at].into()));
            }
            match self.peek() {
                Some(b'[') => {
                    self.at += 1;
                    pieces.push(NamePart::Ranges(self.ranges()?));
                }
                None | Some(b',' | b':') => return Ok(pieces),
                Some(_) => return Err(self.error("a character that is not allowed in host names")),
            }
        }
    }
}

fn items(text: &str) -> Result<Vec<HostItem>, Fault> {
    let mut cursor = HostlistCursor { text, at: 0 };
    let mut all = Vec::new();
    loop {
        let start = cursor.at;
        let pieces = cursor.pieces()?;
        let count = if cursor.skip(b':') { Some(cursor.number()?) } else { None };
        if pieces.is_empty() && count.is_some() {
            cursor.at = start;
            return Err(cursor.error("a count without a host"));
        }
        if !pieces.is_empty() {
            let names = expand(&pieces, HOSTS_MAX - all.len()).ok_or_else(|| {
                cursor.at = start;
                cursor.error("more than 65536 hosts, or a name of more than 255 characters")
            })?;
            all.extend(names.into_iter().map(|host| HostItem { host, count }));
        }
        if cursor.at == text.len() {
            return Ok(all);
        }
        cursor.expect(b',')?;
    }
}

/// All names of an item, the last bracket running fastest; `None` if there are too many.
fn expand(pieces: &[NamePart], most: usize) -> Option<Vec<String>> {
    let mut names = vec![String::new()];
    for piece in pieces {
        match piece {
            NamePart::Text(text) => names.iter_mut().for_each(|name| name.push_str(text)),
            NamePart::Ranges(ranges) => {
                let numbers = ranges.iter().map(|range| range.last - range.first + 1);
                let count = numbers.fold(0usize, usize::saturating_add);
                if count.saturating_mul(names.len()) > most {
                    return None;
                }
                let endings: Vec<String> = ranges.iter().flat_map(numbers_of).collect();
                names = names.iter().flat_map(|name| endings.iter().map(move |end| format!("{name}{end}"))).collect();
            }
        }
        if names.iter().any(|name| name.len() > HOST_BYTES_MAX) {
            return None;
        }
    }
    (names.len() <= most).then_some(names)
}

fn numbers_of(range: &Range) -> impl Iterator<Item = String> + use<'_> {
    (range.first..=range.last).map(|number| format!("{number:0width$}", width = range.width))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists and what `scontrol show hostnames` makes of them.
    const CASES: &[(&str, &str)] = &[
        ("node[01-03,07]", "node01 node02 node03 node07"),
        ("gpu-[1-2]x[3-4]", "gpu-1x3 gpu-1x4 gpu-2x3 gpu-2x4"),
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("a,b,a", "a b a"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11],m", "n8 n9 n10 n11 m"),
        ("n[001-2]", "n001 n002"),
        ("n[9-010]", "n9 n10"),
        ("n[01,2,003]", "n01 n2 n003"),
        ("[1-2]", "1 2"),
        (",a,,b", "a b"),
        ("n[0-0]", "n0"),
        ("rack1-n[1-2],rack2-n[1,3]", "rack1-n1 rack1-n2 rack2-n1 rack2-n3"),
    ];

    #[test]
    fn lists_expand_as_in_slurm() {
        for (list, names) in CASES {
            let expected: Vec<&str> = names.split(' ').collect();
            assert_eq!(hosts(list).unwrap(), expected, "{list}");
        }
        assert_eq!(hosts("").unwrap(), Vec::<String>::new());
        assert_eq!(hosts("n[1,3]-ib").unwrap(), ["n1-ib", "n3-ib"]);
    }

    /// Where Slurm is installed, it is asked.
    #[test]
    fn scontrol_agrees() {
        let directory = tempfile::tempdir().unwrap();
        let conf = directory.path().join("slurm.conf");
        let text = "ClusterName=one\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=all Nodes=n1\n";
        std::fs::write(&conf, text).unwrap();
        for (list, names) in CASES {
            let mut command = std::process::Command::new("scontrol");
            let Ok(output) = command.args(["show", "hostnames", list]).env("SLURM_CONF", &conf).output() else {
                return;
            };
            let answer = String::from_utf8_lossy(&output.stdout);
            assert_eq!(answer.split_whitespace().collect::<Vec<_>>().join(" "), *names, "{list}");
        }
    }

    #[test]
    fn errors_name_the_position() {
        let cases = [
            ("n[1-2", "position 6: expected ']'"),
            ("n1]", "position 3: a character"),
            ("a,n[3-1]", "position 5: a range"),
            ("n[]", "position 3: expected a number"),
            ("n[1-]", "position 5: expected a number"),
            ("n[a]", "position 3: expected a number"),
            ("n[1,,2]", "position 5: expected a number"),
            ("a b", "position 2: a character"),
            ("n[0-99999]", "position 3: a range"),
            ("n[1-999][1-999]", "position 1: more than 65536 hosts"),
            ("a,n[1-65536]", "position 3: more than 65536 hosts"),
            ("n[99999999999999999999]", "position 3: expected a number"),
            (":2", "position 1: a count without a host"),
            ("a:", "position 3: expected a number"),
            ("ünder", "position 1: a character"),
        ];
        for (list, expected) in cases {
            let text = hosts(list).unwrap_err().to_string();
            assert!(text.contains(expected), "{list}: {text}");
        }
    }

    #[test]
    fn counts() {
        let pairs = |list| slots(list).unwrap().into_iter().map(|s| (s.host, s.count)).collect::<Vec<_>>();
        assert_eq!(pairs("a:2,b:2"), [("a".into(), 2), ("b".into(), 2)]);
        assert_eq!(pairs("n[1-2]:3,a,n1"), [("n1".into(), 4), ("n2".into(), 3), ("a".into(), 1)]);
        assert!(slots("a:0").is_err() && slots("").is_err() && slots("a:99999").is_err());
        assert_eq!(tasks_per_node("2(x3),1").unwrap(), [2, 2, 2, 1]);
        assert_eq!(tasks_per_node("4").unwrap(), [4]);
        for bad in ["", "2(x", "2(x3", "x", "2,", "1(x99999)", "2(y3)", "1(x60000),1(x60000)"] {
            assert!(tasks_per_node(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nonsense_is_answered_quickly() {
        let mut state = 7u64;
        let alphabet = b"n0129[]-,:(x)a.\xc3\xbc ";
        for _ in 0..300_000 {
            let mut bytes = Vec::new();
            loop {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                if (state >> 40).is_multiple_of(12) {
                    break;
                }
                bytes.push(alphabet[(state >> 33) as usize % alphabet.len()]);
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(names) = hosts(&text) {
                assert!(names.len() <= HOSTS_MAX);
            }
            let _ = (slots(&text), tasks_per_node(&text));
        }
    }
}
