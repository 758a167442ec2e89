//! What every rank is going to exchange over its device, told to all before anything is: the library underneath compares nothing, and
//! ranks that disagree would wait for ever or read nonsense.

use crate::lane::{Line, Way, label};
use kolo_comm::communicator::Request;
use kolo_comm::fault::rank_name;
use kolo_comm::{CallKind, Communicator, Fault};
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// A group: a line, and which of the groups along its axis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub line: Line,
    pub group: usize,
}

impl Key {
    pub fn encode(&self) -> String {
        let (axis, lane, way) = &self.line;
        let lane = lane.map_or("step".into(), |lane| lane.to_string());
        format!("{} {} {lane} {axis}", self.group, way.encode())
    }

    pub fn decode(text: &str) -> Option<Self> {
        let mut words = text.splitn(4, ' ');
        let (group, way, lane, axis) = (words.next()?, words.next()?, words.next()?, words.next()?);
        Some(Self { line: (axis.into(), lane.parse().ok(), Way::decode(way)?), group: group.parse().ok()? })
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&label(&self.line))
    }
}

/// One exchange, as far as its ranks must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    kind: String,
    element: String,
    count: usize,
    /// Elements to each rank and from each, where ranks differ in that.
    sent: Vec<usize>,
    received: Vec<usize>,
    name: String,
}

impl Call {
    pub fn new(request: &Request, name: &str) -> Self {
        let counts = |parts: &[kolo_comm::task::RankPart]| parts.iter().map(|part| part.count).collect();
        let kind = match request.kind {
            CallKind::Send | CallKind::Recv => "message",
            kind => kind.name(),
        };
        Self {
            kind: kind.into(),
            element: request.element.name().into(),
            count: request.count,
            sent: counts(&request.send),
            received: counts(&request.recv),
            name: name.into(),
        }
    }

    fn encode(&self) -> String {
        let list = |counts: &[usize]| {
            let texts: Vec<String> = counts.iter().map(usize::to_string).collect();
            if texts.is_empty() { "-".into() } else { texts.join(",") }
        };
        let Self { kind, element, count, sent, received, name } = self;
        format!("{kind} {element} {count} {} {} {}", list(sent), list(received), name.replace('\n', " "))
    }

    fn decode(text: &str) -> Option<Self> {
        let list = |text: &str| -> Option<Vec<usize>> {
            if text == "-" { Some(Vec::new()) } else { text.split(',').map(|count| count.parse().ok()).collect() }
        };
        let words: Vec<&str> = text.splitn(6, ' ').collect();
        let [kind, element, count, sent, received, name] = words[..] else { return None };
        let (sent, received, count) = (list(sent)?, list(received)?, count.parse().ok()?);
        Some(Self { kind: kind.into(), element: element.into(), count, sent, received, name: name.into() })
    }

    /// Whether this call of one member goes with that of another.
    fn goes_with(&self, own: usize, other: &Self, theirs: usize) -> bool {
        let to = |call: &Self, member: usize| call.sent.get(member).copied().unwrap_or(0);
        let from = |call: &Self, member: usize| call.received.get(member).copied().unwrap_or(0);
        let parts = match self.kind == CallKind::AllToAll.name() {
            true => to(self, theirs) == from(other, own) && from(self, theirs) == to(other, own),
            false => self.received == other.received,
        };
        parts
            && (&self.kind, &self.element, self.count, &self.name)
                == (&other.kind, &other.element, other.count, &other.name)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {} (`{}`", self.kind, self.count, self.element, self.name)?;
        for (word, counts) in [("to", &self.sent), ("parts", &self.received)] {
            if !counts.is_empty() {
                write!(f, ", {word} {counts:?}")?;
            }
        }
        f.write_char(')')
    }
}

/// A rank's exchanges, by group and in their order.
pub(crate) type Calls = BTreeMap<Key, Vec<Call>>;

pub(crate) fn encode(calls: &Calls) -> String {
    let mut text = String::new();
    for (key, calls) in calls {
        let _ = writeln!(text, "group {}", key.encode());
        calls.iter().for_each(|call| _ = writeln!(text, "call {}", call.encode()));
    }
    text
}

/// What [`encode`] wrote.
pub(crate) fn decode(text: &str) -> Option<Calls> {
    let mut calls = Calls::new();
    let mut last = None;
    for line in text.lines() {
        match line.split_once(' ')? {
            ("group", key) => last = Some(Key::decode(key)?),
            ("call", call) => calls.entry(last.clone()?).or_default().push(Call::decode(call)?),
            _ => return None,
        }
    }
    Some(calls)
}

/// The ranks of a group, in its order.
pub(crate) fn members(key: &Key, all: &[Calls]) -> Vec<usize> {
    all.iter().enumerate().filter(|(_, calls)| calls.contains_key(key)).map(|(rank, _)| rank).collect()
}

/// Compares the exchanges of all ranks. All find the same.
pub(crate) fn check(world: &Communicator, all: &[Calls], size_of: impl Fn(&Key) -> usize) -> Result<(), Fault> {
    let name = |rank: usize| rank_name(rank, &world.watch().host(rank));
    let mut keys: Vec<&Key> = all.iter().flat_map(BTreeMap::keys).collect();
    keys.sort();
    keys.dedup();
    for key in keys {
        let members = members(key, all);
        let disagree = |text: String| {
            let hint = "all ranks must exchange the same tensors in the same order with the same sizes";
            Err(Fault::BadCall(format!("ranks disagree on exchanges along {key}: {text}\n  hint: {hint}")))
        };
        if members.len() != size_of(key) {
            let names: Vec<String> = members.iter().map(|rank| name(*rank)).collect();
            return disagree(format!("only {} take part, of {} ranks", names.join(", "), size_of(key)));
        }
        for (own, rank) in members.iter().enumerate() {
            for (theirs, other) in members.iter().enumerate().skip(own + 1) {
                let (mine, yours) = (&all[*rank][key], &all[*other][key]);
                let wrong = (0..mine.len().max(yours.len())).find(|at| match (mine.get(*at), yours.get(*at)) {
                    (Some(one), Some(another)) => !one.goes_with(own, another, theirs),
                    _ => true,
                });
                if let Some(at) = wrong {
                    let text = |call: Option<&Call>| call.map_or("nothing".into(), Call::to_string);
                    let (one, another) = (text(mine.get(at)), text(yours.get(at)));
                    return disagree(format!(
                        "{} has {one} as number {at}, {} has {another}",
                        name(*rank),
                        name(*other)
                    ));
                }
            }
        }
    }
    Ok(())
}
