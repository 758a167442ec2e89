//! Builds a graph by method chaining.
//!
//! A [`Tensor`] is a copyable handle; the ops crate adds the methods. A mistake does not panic and does not need a `?`
//! after every call: the builder keeps the first error and [`Builder::finish`] returns it.

use crate::graph::{Graph, GraphError, Stage, ValueId};
use crate::op::Op;
use crate::sources::{Full, Init, Input, InputRole, Param, State};
use crate::types::{DType, Type};
use std::any::TypeId;
use std::cell::{Ref, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

#[derive(Debug, Default)]
struct Inner {
    graph: Graph,
    scopes: Vec<String>,
    stage: Stage,
    error: Option<GraphError>,
    /// Inputs, parameters and states by kind and name.
    named: HashMap<(TypeId, String), ValueId>,
}

/// A graph under construction.
#[derive(Debug, Default)]
pub struct Builder {
    inner: RefCell<Inner>,
}

/// A value of a graph under construction.
#[derive(Clone, Copy)]
pub struct Tensor<'b> {
    builder: &'b Builder,
    id: ValueId,
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}: {}", self.id.0, self.ty())
    }
}

impl Builder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on building a finished graph.
    pub fn resume(graph: Graph) -> Self {
        let mut named = HashMap::new();
        // The first of a name, should there be two.
        let mut add = |kind: TypeId, name: &str, id: ValueId| {
            named.entry((kind, name.to_string())).or_insert(id);
        };
        graph.inputs().for_each(|(id, op)| add(TypeId::of::<Input>(), &op.name, id));
        graph.params().for_each(|(id, op)| add(TypeId::of::<Param>(), &op.name, id));
        graph.states().for_each(|(id, op)| add(TypeId::of::<State>(), &op.name, id));
        Self { inner: RefCell::new(Inner { graph, named, ..Inner::default() }) }
    }

    /// The graph, or the first thing that was wrong with it.
    pub fn finish(self) -> Result<Graph, GraphError> {
        let inner = self.inner.into_inner();
        match inner.error {
            Some(error) => Err(error),
            None => Ok(inner.graph),
        }
    }

    pub fn graph(&self) -> Ref<'_, Graph> {
        Ref::map(self.inner.borrow(), |inner| &inner.graph)
    }

    pub fn failed(&self) -> bool {
        self.inner.borrow().error.is_some()
    }

    /// Records an error unless there is one already.
    pub fn fail(&self, op: &str, message: impl Into<String>, hint: impl Into<String>) {
        let scope = self.scope_name();
        let mut inner = self.inner.borrow_mut();
        inner.error.get_or_insert(GraphError {
            op: op.into(),
            scope,
            message: message.into(),
            hint: hint.into(),
            inputs: None,
        });
    }

    /// Names everything made inside `f` under `name`.
    pub fn scope<R>(&self, name: impl fmt::Display, f: impl FnOnce() -> R) -> R {
        self.inner.borrow_mut().scopes.push(name.to_string());
        let result = f();
        self.inner.borrow_mut().scopes.pop();
        result
    }

    /// Marks everything made inside `f` as part of `stage`.
    pub fn stage<R>(&self, stage: Stage, f: impl FnOnce() -> R) -> R {
        let before = std::mem::replace(&mut self.inner.borrow_mut().stage, stage);
        let result = f();
        self.inner.borrow_mut().stage = before;
        result
    }

    /// The current scope, such as `h.3.attn`.
    pub fn scope_name(&self) -> String {
        self.inner.borrow().scopes.join(".")
    }

    pub fn qualify(&self, name: &str) -> String {
        match self.scope_name() {
            scope if scope.is_empty() => name.into(),
            scope if name.is_empty() => scope,
            scope => format!("{scope}.{name}"),
        }
    }

    pub fn tensor(&self, id: ValueId) -> Tensor<'_> {
        Tensor { builder: self, id }
    }

    /// Appends `op`; all its outputs.
    pub fn apply_all(&self, op: impl Op, inputs: &[Tensor<'_>]) -> Vec<Tensor<'_>> {
        self.apply_arc(Arc::new(op), inputs)
    }

    /// Appends `op`; its first output.
    pub fn apply(&self, op: impl Op, inputs: &[Tensor<'_>]) -> Tensor<'_> {
        self.apply_all(op, inputs)[0]
    }

    pub fn apply_arc(&self, op: Arc<dyn Op>, inputs: &[Tensor<'_>]) -> Vec<Tensor<'_>> {
        let ids: Vec<ValueId> = inputs.iter().map(|tensor| tensor.id).collect();
        let scope: Arc<str> = self.scope_name().into();
        let mut inner = self.inner.borrow_mut();
        let stage = inner.stage;
        let pushed = match inner.error {
            Some(_) => None,
            None => inner.graph.push(op, ids, scope, stage).map_err(|error| inner.error = Some(error)).ok(),
        };
        let outputs = match pushed {
            Some(node) => inner.graph.node(node).outputs.clone(),
            None => vec![inner.placeholder(); OUTPUTS_MAX.max(inputs.len())],
        };
        drop(inner);
        outputs.into_iter().map(|id| self.tensor(id)).collect()
    }

    /// A per-grain input.
    pub fn input(&self, name: &str, ty: Type) -> Tensor<'_> {
        self.named_input(name, ty, false, InputRole::Data)
    }

    /// An input that is the same for all grains of a step.
    pub fn step_input(&self, name: &str, ty: Type) -> Tensor<'_> {
        self.named_input(name, ty, true, InputRole::Data)
    }

    /// The learning rate of the step.
    pub fn learning_rate(&self) -> Tensor<'_> {
        self.named_input("lr", Type::f32([]), true, InputRole::LearningRate)
    }

    /// The number of the step, counted from one.
    pub fn step_number(&self) -> Tensor<'_> {
        self.named_input("step", Type::f32([]), true, InputRole::StepNumber)
    }

    /// The words that key a grain's random numbers: [key, key, step, first sample of the grain].
    pub fn rng(&self) -> Tensor<'_> {
        self.named_input("rng", Type::i32([4]), false, InputRole::Rng)
    }

    fn named_input(&self, name: &str, ty: Type, per_step: bool, role: InputRole) -> Tensor<'_> {
        let shape = ty.shape.to_vec();
        self.find_or(name, Input { name: name.into(), dtype: ty.dtype, shape, per_step, role })
    }

    /// A parameter under the current scope. Asking again for the same name gives the same tensor, which ties weights.
    pub fn param(&self, name: &str, shape: impl Into<Vec<usize>>, init: Init) -> Tensor<'_> {
        let name = self.qualify(name);
        let shape = shape.into();
        let tensor = self.find_or(&name, Param::new(&name, shape.clone(), init));
        if !self.failed() && tensor.shape() != shape {
            self.fail("param", format!("`{name}` is {:?} here, but {shape:?} elsewhere", tensor.shape()), "rename one");
        }
        tensor
    }

    /// A state tensor under the current scope.
    pub fn state(&self, name: &str, ty: Type, init: Init) -> Tensor<'_> {
        let name = self.qualify(name);
        self.find_or(&name, State::new(&name, ty, init))
    }

    pub fn full(&self, value: f64, ty: Type) -> Tensor<'_> {
        self.apply(Full { value, dtype: ty.dtype, shape: ty.shape.to_vec() }, &[])
    }

    pub fn scalar(&self, value: f64) -> Tensor<'_> {
        self.full(value, Type::f32([]))
    }

    /// Makes `value` a named result.
    pub fn output(&self, name: &str, value: Tensor<'_>) {
        self.inner.borrow_mut().graph.outputs.push((name.into(), value.id));
    }

    /// At the end of the step, `state` becomes `value`.
    pub fn update(&self, state: Tensor<'_>, value: Tensor<'_>) {
        if !self.failed() && state.ty() != value.ty() {
            let message = format!("a state of type {} cannot become {}", state.ty(), value.ty());
            self.fail("update", message, "cast or reshape the new value");
        }
        self.inner.borrow_mut().graph.updates.push((state.id, value.id));
    }

    /// The source of this kind and name; `op` if there is none yet.
    fn find_or<T: Op>(&self, name: &str, op: T) -> Tensor<'_> {
        let key = (TypeId::of::<T>(), name.to_string());
        let found = self.inner.borrow().named.get(&key).copied();
        if let Some(id) = found {
            return self.tensor(id);
        }
        let tensor = self.apply(op, &[]);
        if !self.failed() {
            self.inner.borrow_mut().named.insert(key, tensor.id);
        }
        tensor
    }
}

/// Enough placeholder outputs for any op after an error.
const OUTPUTS_MAX: usize = 8;

impl Inner {
    fn placeholder(&mut self) -> ValueId {
        let op = Full { value: 0.0, dtype: DType::F32, shape: Vec::new() };
        let node = self.graph.push_typed(Arc::new(op), Vec::new(), vec![Type::f32([])], "".into(), Stage::Forward);
        self.graph.node(node).outputs[0]
    }
}

impl<'b> Tensor<'b> {
    pub fn builder(&self) -> &'b Builder {
        self.builder
    }

    pub fn id(&self) -> ValueId {
        self.id
    }

    pub fn ty(&self) -> Type {
        self.builder.graph().ty(self.id).clone()
    }

    pub fn shape(&self) -> Vec<usize> {
        self.ty().shape.to_vec()
    }

    pub fn dtype(&self) -> DType {
        self.builder.graph().ty(self.id).dtype
    }

    pub fn rank(&self) -> usize {
        self.builder.graph().ty(self.id).rank()
    }

    /// The size of one dim; after an error, when shapes mean nothing, 1.
    pub fn dim(&self, at: usize) -> usize {
        let size = self.builder.graph().ty(self.id).shape.get(at).copied();
        if size.is_none() && !self.builder.failed() {
            self.builder.fail("dim", format!("{} has no dim {at}", self.ty()), "count dims from 0");
        }
        size.unwrap_or(1)
    }

    /// Appends `op` with this tensor as its first input.
    pub fn then(self, op: impl Op, rest: &[Tensor<'b>]) -> Tensor<'b> {
        let mut inputs = vec![self];
        inputs.extend_from_slice(rest);
        self.builder.apply(op, &inputs)
    }
}

/// Declares an extension trait of [`Tensor`] and implements it: how an op's file adds its own methods.
#[macro_export]
macro_rules! methods {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$fdoc:meta])* fn $f:ident($self:ident $(, $arg:ident : $t:ty)* $(,)?) -> $ret:ty $body:block)*
    }) => {
        $(#[$doc])*
        pub trait $name<'b>: Sized {
            $($(#[$fdoc])* #[allow(clippy::too_many_arguments, missing_docs)] fn $f($self $(, $arg: $t)*) -> $ret;)*
        }
        impl<'b> $name<'b> for $crate::Tensor<'b> {
            $(#[allow(clippy::too_many_arguments)] fn $f($self $(, $arg: $t)*) -> $ret $body)*
        }
    };
}
