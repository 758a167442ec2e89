//! The text form: printer and parser. The grammar is in `docs/ir.md`; `parse(print(g))` prints the same text again.

use crate::attr::{Attr, AttrReader};
use crate::graph::{Graph, Node, Stage, ValueId};
use crate::op::{Op, OpKind};
use crate::types::{DType, Type};
use std::fmt::{self, Write};
use std::sync::Arc;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "graph {{")?;
        for node in &self.nodes {
            writeln!(f, "  {}", line(self, node))?;
        }
        for (name, id) in &self.outputs {
            writeln!(f, "  output {} = %{}", quote(name), id.0)?;
        }
        for (state, value) in &self.updates {
            writeln!(f, "  update %{} = %{}", state.0, value.0)?;
        }
        writeln!(f, "}}")
    }
}

/// Text in quotes, with the three escapes the parser knows.
pub fn quote(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// The line without its comment; two slashes inside quotes are text.
fn without_comment(line: &str) -> &str {
    let (mut quoted, mut escaped, mut slash) = (false, false, false);
    for (at, c) in line.char_indices() {
        match c {
            '/' if slash && !quoted => return &line[..at - 1],
            '"' if !escaped => quoted = !quoted,
            _ => {}
        }
        slash = c == '/' && !quoted;
        escaped = quoted && c == '\\' && !escaped;
    }
    line
}

/// One node as text.
pub fn line(graph: &Graph, node: &Node) -> String {
    let values = |ids: &[ValueId]| ids.iter().map(|id| format!("%{}", id.0)).collect::<Vec<_>>().join(", ");
    let types = graph.types(&node.outputs).iter().map(Type::to_string).collect::<Vec<_>>().join(", ");
    let mut text = format!("{} = {}({}) : {types}", values(&node.outputs), node.op.signature(), values(&node.inputs));
    if node.stage != Stage::Forward {
        let _ = write!(text, " #{}", node.stage.name());
    }
    if !node.scope.is_empty() {
        let _ = write!(text, " @{}", node.scope);
    }
    text
}

/// Where and why a text is no graph.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    pub line: usize,
    pub message: String,
}

/// Reads a graph whose ops are in `registry`.
pub fn parse(text: &str, registry: &[OpKind]) -> Result<Graph, ParseError> {
    let mut graph = Graph::default();
    let mut depth = 0;
    for (at, raw) in text.lines().enumerate() {
        let content = without_comment(raw).trim();
        let result = match content {
            "" => Ok(()),
            "graph {" if depth == 0 => {
                depth = 1;
                Ok(())
            }
            "}" if depth == 1 => {
                depth = 2;
                Ok(())
            }
            _ if depth != 1 => Err("expected `graph {`".into()),
            _ => statement(&mut graph, content, registry),
        };
        result.map_err(|message: String| ParseError { line: at + 1, message })?;
    }
    if depth != 2 {
        return Err(ParseError { line: text.lines().count(), message: "the graph is not closed with `}`".into() });
    }
    Ok(graph)
}

fn statement(graph: &mut Graph, content: &str, registry: &[OpKind]) -> Result<(), String> {
    let mut cursor = Cursor { rest: content };
    if cursor.take("output ") {
        let name = cursor.text()?;
        cursor.expect("=")?;
        let id = cursor.value(graph)?;
        graph.outputs.push((name, id));
    } else if cursor.take("update ") {
        let state = cursor.value(graph)?;
        cursor.expect("=")?;
        let value = cursor.value(graph)?;
        graph.updates.push((state, value));
    } else {
        return node(graph, &mut cursor, registry);
    }
    cursor.end()
}

fn node(graph: &mut Graph, cursor: &mut Cursor<'_>, registry: &[OpKind]) -> Result<(), String> {
    let mut names = Vec::new();
    loop {
        names.push(cursor.place()?);
        if !cursor.take(",") {
            break;
        }
    }
    cursor.expect("=")?;
    let op = cursor.op(registry)?;
    cursor.expect("(")?;
    let mut inputs = Vec::new();
    while !cursor.take(")") {
        inputs.push(cursor.value(graph)?);
        if !cursor.take(",") {
            cursor.expect(")")?;
            break;
        }
    }
    cursor.expect(":")?;
    let mut types = vec![cursor.ty()?];
    while cursor.take(",") {
        types.push(cursor.ty()?);
    }
    let stage = match cursor.take("#") {
        true => {
            let name = cursor.word()?;
            Stage::ALL.into_iter().find(|stage| stage.name() == name).ok_or(format!("no stage `{name}`"))?
        }
        false => Stage::Forward,
    };
    let scope: Arc<str> = if cursor.take("@") { std::mem::take(&mut cursor.rest).trim().into() } else { "".into() };
    cursor.end()?;
    let node = graph.push(op, inputs, scope, stage).map_err(|error| error.to_string())?;
    let made = graph.node(node);
    let expected: Vec<usize> = made.outputs.iter().map(|id| id.0 as usize).collect();
    if names != expected {
        return Err(format!("outputs are numbered {names:?}, but the next numbers are {expected:?}"));
    }
    if graph.types(&made.outputs) != types {
        let types: Vec<String> = graph.types(&made.outputs).iter().map(Type::to_string).collect();
        return Err(format!("the op makes {}, but the line says otherwise", types.join(", ")));
    }
    Ok(())
}

/// Reads one op with its attributes, such as `scale{factor=2.0}`; returns it and the rest of the text.
pub fn parse_op<'a>(text: &'a str, registry: &[OpKind]) -> Result<(Arc<dyn Op>, &'a str), String> {
    let mut cursor = Cursor { rest: text };
    let op = cursor.op(registry)?;
    Ok((op, cursor.rest))
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) {
            return Ok(());
        }
        let found: String = self.rest.chars().take(12).collect();
        Err(format!("expected `{token}`, found `{found}`"))
    }

    fn end(&mut self) -> Result<(), String> {
        self.skip();
        if self.rest.is_empty() { Ok(()) } else { Err(format!("unexpected `{}`", self.rest)) }
    }

    fn while_matching(&mut self, accept: impl Fn(char) -> bool) -> &'a str {
        self.skip();
        let end = self.rest.find(|c| !accept(c)).unwrap_or(self.rest.len());
        let (token, rest) = self.rest.split_at(end);
        self.rest = rest;
        token
    }

    fn word(&mut self) -> Result<&'a str, String> {
        match self.while_matching(|c| c.is_alphanumeric() || c == '_') {
            "" => Err("expected a name".into()),
            word => Ok(word),
        }
    }

    /// The number of a value: `%12`.
    fn place(&mut self) -> Result<usize, String> {
        self.expect("%")?;
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.parse().map_err(|_| format!("expected a number after `%`, found `{digits}`"))
    }

    fn value(&mut self, graph: &Graph) -> Result<ValueId, String> {
        let number = self.place()?;
        if number < graph.values.len() {
            return Ok(ValueId(number as u32));
        }
        Err(format!("%{number} is not made yet"))
    }

    fn text(&mut self) -> Result<String, String> {
        self.expect("\"")?;
        let mut out = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Ok(out);
                }
                '\\' => match chars.next() {
                    Some((_, escaped @ ('"' | '\\'))) => out.push(escaped),
                    Some((_, 'n')) => out.push('\n'),
                    _ => return Err("only \\\", \\\\ and \\n are escapes".into()),
                },
                _ => out.push(c),
            }
        }
        Err("text is not closed".into())
    }

    fn ty(&mut self) -> Result<Type, String> {
        let word = self.word()?;
        let dtype = DType::parse(word).ok_or_else(|| format!("no type `{word}`"))?;
        let shape = self.list()?.into_iter().map(|size| usize::try_from(size).map_err(|_| "a negative size"));
        Ok(Type::new(dtype, shape.collect::<Result<Vec<_>, _>>()?))
    }

    fn list(&mut self) -> Result<Vec<i64>, String> {
        self.expect("[")?;
        let mut values = Vec::new();
        while !self.take("]") {
            let token = self.while_matching(|c| c.is_ascii_digit() || c == '-');
            values.push(token.parse().map_err(|_| format!("expected a whole number, found `{token}`"))?);
            if !self.take(",") {
                self.expect("]")?;
                break;
            }
        }
        Ok(values)
    }

    fn attr(&mut self) -> Result<Attr, String> {
        self.skip();
        match self.rest.chars().next() {
            Some('"') => Ok(Attr::Text(self.text()?)),
            Some('[') => Ok(Attr::List(self.list()?)),
            Some(c) if c.is_ascii_digit() || c == '-' => {
                let token = self.while_matching(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
                let int = token.parse().map(Attr::Int).ok();
                int.or(token.parse().map(Attr::Float).ok()).ok_or_else(|| format!("`{token}` is not a number"))
            }
            _ => match self.word()? {
                "true" => Ok(Attr::Bool(true)),
                "false" => Ok(Attr::Bool(false)),
                "inf" => Ok(Attr::Float(f64::INFINITY)),
                "NaN" => Ok(Attr::Float(f64::NAN)),
                word => DType::parse(word).map(Attr::DType).ok_or_else(|| format!("`{word}` is not a value")),
            },
        }
    }

    fn op(&mut self, registry: &[OpKind]) -> Result<Arc<dyn Op>, String> {
        let name = self.word()?;
        let mut attrs = Vec::new();
        if self.take("{") {
            while !self.take("}") {
                let key = self.word()?.to_string();
                self.expect("=")?;
                attrs.push((key, self.attr()?));
                if !self.take(",") {
                    self.expect("}")?;
                    break;
                }
            }
        }
        let kind = registry.iter().find(|kind| kind.name == name);
        let kind = kind.ok_or_else(|| match crate::settings::nearest(name, registry.iter().map(|kind| kind.name)) {
            Some(near) => format!("no op `{name}`; did you mean `{near}`?"),
            None => format!("no op `{name}`"),
        })?;
        (kind.read)(&AttrReader { attrs: &attrs }).map_err(|problem| format!("{name}: {problem}"))
    }
}
