//! Optimizers: data read from `[train] optimizer` or given as a rule ([`Optimizer::new`]), and the nodes that update one
//! parameter.
//!
//! `KINDS` lists them. Each kind has the keys it uses, with PyTorch's defaults where PyTorch has the kind. The learning
//! rate, the gradient's scale and the step are tensors: a schedule moves them without another graph.
//!
//! Vectors and scalars (biases, the gains of norms) have no weight decay, and LARS and LAMB do not adapt their rate.

mod typed;

use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::{Builder, Init, Op, Stage, Tensor};
use kolo_ops::optim::{Adagrad, Adam, LambApply, LambDirection, Lars, OptimMethods, Rmsprop, Sgd, SgdPlain};
pub use typed::OptimizerError;

/// How parameters follow their gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    lr: f64,
    rule: Rule,
}

/// Scalars that all updates of a step read.
#[derive(Clone, Copy, Debug)]
pub struct StepScalars<'b> {
    /// The learning rate.
    pub lr: Tensor<'b>,
    /// A factor on every gradient.
    pub scale: Tensor<'b>,
    /// The number of the step, counted from one.
    pub step: Tensor<'b>,
}

/// The op of a kind, with the weight decay that matrices have.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    Sgd(Sgd),
    SgdPlain(SgdPlain),
    Adam(Adam),
    Rmsprop(Rmsprop),
    Adagrad(Adagrad),
    Lars(Lars),
    Lamb(LambDirection),
}

/// One kind of optimizer; the first is the default: its name in a job file, the learning rate if none is given, and its reader.
struct Kind {
    name: &'static str,
    lr: Rate,
    read: fn(&Settings) -> Result<Rule, SettingError>,
}

/// The learning rate if a job names none.
enum Rate {
    /// What the model says.
    OfModel,
    Fixed(f64),
}

impl Rate {
    fn with_model(&self, model_rate: f64) -> f64 {
        match self {
            Rate::OfModel => model_rate,
            Rate::Fixed(rate) => *rate,
        }
    }
}

const ADAM_RATE: f64 = 1e-3;

const KINDS: [Kind; 7] = [
    Kind { name: "adamw", lr: Rate::OfModel, read: |settings| read_adam(settings, 0.01, true) },
    Kind { name: "adam", lr: Rate::OfModel, read: |settings| read_adam(settings, 0.0, false) },
    Kind { name: "sgd", lr: Rate::Fixed(1e-3), read: read_sgd },
    Kind { name: "lars", lr: Rate::Fixed(1.0), read: read_lars },
    Kind { name: "lamb", lr: Rate::Fixed(1e-3), read: read_lamb },
    Kind { name: "rmsprop", lr: Rate::Fixed(0.01), read: read_rmsprop },
    Kind { name: "adagrad", lr: Rate::Fixed(0.01), read: read_adagrad },
];

/// Beyond this, a rate or a decay is a slip of the pen.
const RATE_MAX: f64 = 1e3;

impl Optimizer {
    /// Reads the optimizer's table. Keys that the kind does not use are errors.
    ///
    /// | kind | keys |
    /// |---|---|
    /// | all | `lr`, `weight_decay` |
    /// | `sgd` | `momentum`, `nesterov` |
    /// | `adam`, `adamw`, `lamb` | `beta1`, `beta2`, `eps` |
    /// | `lars` | `momentum`, `trust`, `eps` |
    /// | `rmsprop` | `alpha`, `momentum`, `eps` |
    /// | `adagrad` | `lr_decay`, `eps` |
    pub fn read(settings: &Settings) -> Result<Self, SettingError> {
        Self::read_for(settings, ADAM_RATE)
    }

    /// The same for a model that says which rate suits it under Adam and AdamW.
    pub fn read_for(settings: &Settings, model_rate: f64) -> Result<Self, SettingError> {
        let name = settings.choice("kind", &KINDS.map(|kind| kind.name))?;
        let kind = KINDS.iter().find(|kind| kind.name == name).expect("a choice is one of the choices");
        let lr = settings.float_in("lr", kind.lr.with_model(model_rate), 0.0, RATE_MAX)?;
        let rule = (kind.read)(settings)?;
        settings.finish()?;
        Ok(Self { lr, rule })
    }

    /// The same with another base rate.
    pub fn with_lr(self, lr: f64) -> Self {
        Self { lr, ..self }
    }

    /// The base learning rate, which the schedule multiplies.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Appends the update of the parameter `param`, called `name`, and the states it needs, called `optim.{name}.…`. Call
    /// outside of any scope: a scope would change the names of the states.
    pub fn update<'b>(
        &self,
        builder: &'b Builder,
        name: &str,
        param: Tensor<'b>,
        grad: Tensor<'b>,
        StepScalars { lr, scale, step }: StepScalars<'b>,
    ) {
        assert_eq!(builder.scope_name(), "", "an update inside a scope");
        let target = Target { builder, name, param, grad };
        builder.stage(Stage::Update, || match self.rule.clone().for_rank(param.rank()) {
            Rule::Sgd(op) => target.apply(op, &["velocity"], &[lr, scale]),
            Rule::SgdPlain(op) => target.apply(op, &[], &[lr, scale]),
            Rule::Adam(op) => target.apply(op, &["m", "v"], &[lr, scale, step]),
            Rule::Rmsprop(op) => target.apply(op, &["square", "velocity"], &[lr, scale]),
            Rule::Adagrad(op) => target.apply(op, &["sum"], &[lr, scale, step]),
            Rule::Lars(op) => {
                let [param_norm, grad_norm] = target.norms(grad);
                target.apply(op, &["velocity"], &[param_norm, grad_norm, lr, scale]);
            }
            Rule::Lamb(op) => target.apply_lamb(op, lr, scale, step),
        });
    }
}

impl Rule {
    /// The rule for a parameter of this rank.
    fn for_rank(mut self, rank: usize) -> Self {
        if rank < 2 {
            *self.weight_decay() = 0.0;
        }
        self
    }

    fn weight_decay(&mut self) -> &mut f64 {
        match self {
            Rule::Sgd(op) => &mut op.weight_decay,
            Rule::SgdPlain(op) => &mut op.weight_decay,
            Rule::Adam(op) => &mut op.weight_decay,
            Rule::Rmsprop(op) => &mut op.weight_decay,
            Rule::Adagrad(op) => &mut op.weight_decay,
            Rule::Lars(op) => &mut op.weight_decay,
            Rule::Lamb(op) => &mut op.weight_decay,
        }
    }
}

/// The parameter that an update is for.
struct Target<'b, 'n> {
    builder: &'b Builder,
    name: &'n str,
    param: Tensor<'b>,
    grad: Tensor<'b>,
}

impl<'b> Target<'b, '_> {
    fn states(&self, names: &[&str]) -> Vec<Tensor<'b>> {
        let name = |state: &&str| format!("optim.{}.{state}", self.name);
        names.iter().map(|state| self.builder.state(&name(state), self.param.ty(), Init::ZEROS)).collect()
    }

    /// Appends `(param, grad, states…, scalars…) -> (param, states…)`.
    fn apply(&self, op: impl Op, states: &[&str], scalars: &[Tensor<'b>]) {
        let states = self.states(states);
        let inputs = [&[self.param, self.grad], &states[..], scalars].concat();
        let outputs = self.builder.apply_all(op, &inputs);
        for (state, value) in std::iter::once(self.param).chain(states).zip(outputs) {
            self.builder.update(state, value);
        }
    }

    fn apply_lamb(&self, op: LambDirection, lr: Tensor<'b>, scale: Tensor<'b>, step: Tensor<'b>) {
        let states = self.states(&["m", "v"]);
        let inputs = [self.param, self.grad, states[0], states[1], scale, step];
        let outputs = self.builder.apply_all(op, &inputs);
        let [param_norm, direction_norm] = self.norms(outputs[0]);
        let moved = self.builder.apply(LambApply {}, &[self.param, outputs[0], param_norm, direction_norm, lr]);
        self.builder.update(self.param, moved);
        self.builder.update(states[0], outputs[1]);
        self.builder.update(states[1], outputs[2]);
    }

    /// The norms of the parameter and of `other`. For a vector they are zero, which turns the adaptation off.
    fn norms(&self, other: Tensor<'b>) -> [Tensor<'b>; 2] {
        match self.param.rank() < 2 {
            true => [self.builder.scalar(0.0); 2],
            false => [self.param.l2_norm(), other.l2_norm()],
        }
    }
}

fn weight_decay(settings: &Settings, default: f64) -> Result<f64, SettingError> {
    settings.float_in("weight_decay", default, 0.0, RATE_MAX)
}

/// A share between 0 and 1: a momentum, the memory of an average.
fn share(settings: &Settings, key: &str, default: f64) -> Result<f64, SettingError> {
    settings.float_in(key, default, 0.0, 1.0)
}

/// The memory of an average that is corrected for its start; a memory of 1 would divide by zero.
fn beta(settings: &Settings, key: &str, default: f64) -> Result<f64, SettingError> {
    match share(settings, key, default)? {
        1.0 => Err(settings.wrong(key, "must be less than 1", format!("write `{key} = {default}`"))),
        beta => Ok(beta),
    }
}

fn read_sgd(settings: &Settings) -> Result<Rule, SettingError> {
    let momentum = share(settings, "momentum", 0.0)?;
    let nesterov = settings.bool("nesterov", false)?;
    let weight_decay = weight_decay(settings, 0.0)?;
    if momentum > 0.0 {
        return Ok(Rule::Sgd(Sgd { momentum, nesterov, weight_decay }));
    }
    if nesterov {
        return Err(settings.wrong("nesterov", "needs a momentum", "write `momentum = 0.9`, or `nesterov = false`"));
    }
    Ok(Rule::SgdPlain(SgdPlain { weight_decay }))
}

fn read_adam(settings: &Settings, default_decay: f64, decoupled: bool) -> Result<Rule, SettingError> {
    Ok(Rule::Adam(Adam {
        beta1: beta(settings, "beta1", 0.9)?,
        beta2: beta(settings, "beta2", 0.999)?,
        eps: share(settings, "eps", 1e-8)?,
        weight_decay: weight_decay(settings, default_decay)?,
        decoupled,
    }))
}

fn read_lars(settings: &Settings) -> Result<Rule, SettingError> {
    Ok(Rule::Lars(Lars {
        momentum: share(settings, "momentum", 0.9)?,
        weight_decay: weight_decay(settings, 1e-4)?,
        trust: settings.float_in("trust", 1e-3, 0.0, RATE_MAX)?,
        eps: share(settings, "eps", 1e-8)?,
    }))
}

fn read_lamb(settings: &Settings) -> Result<Rule, SettingError> {
    Ok(Rule::Lamb(LambDirection {
        beta1: beta(settings, "beta1", 0.9)?,
        beta2: beta(settings, "beta2", 0.999)?,
        eps: share(settings, "eps", 1e-6)?,
        weight_decay: weight_decay(settings, 0.01)?,
    }))
}

fn read_rmsprop(settings: &Settings) -> Result<Rule, SettingError> {
    Ok(Rule::Rmsprop(Rmsprop {
        alpha: share(settings, "alpha", 0.99)?,
        eps: share(settings, "eps", 1e-8)?,
        momentum: share(settings, "momentum", 0.0)?,
        weight_decay: weight_decay(settings, 0.0)?,
    }))
}

fn read_adagrad(settings: &Settings) -> Result<Rule, SettingError> {
    Ok(Rule::Adagrad(Adagrad {
        eps: share(settings, "eps", 1e-10)?,
        weight_decay: weight_decay(settings, 0.0)?,
        lr_decay: settings.float_in("lr_decay", 0.0, 0.0, RATE_MAX)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;
    use kolo_graph::sources::State;
    use kolo_graph::{Graph, Type};

    fn settings(kind: &str, keys: &[(&str, Setting)]) -> Settings {
        let mut settings = Settings::new("train.optimizer", "job.toml:9");
        settings.set("kind", "job.toml:9", Setting::Text(kind.into()));
        for (key, value) in keys {
            settings.set(key, "job.toml:10", value.clone());
        }
        settings
    }

    /// The update of a matrix and a vector.
    fn graph(optimizer: &Optimizer) -> Graph {
        let builder = Builder::new();
        let [lr, scale, step] = ["lr", "scale", "step"].map(|name| builder.step_input(name, Type::f32([])));
        for (name, shape) in [("weight", vec![3, 5]), ("bias", vec![5])] {
            let param = builder.param(name, shape.clone(), Init::ONES);
            let grad = builder.step_input(&format!("{name}.grad"), Type::f32(shape));
            optimizer.update(&builder, name, param, grad, StepScalars { lr, scale, step });
        }
        builder.finish().unwrap()
    }

    #[test]
    fn every_kind_makes_a_sound_update_of_parameters_and_states() {
        for kind in &KINDS {
            let optimizer = Optimizer::read(&settings(kind.name, &[])).unwrap();
            assert_eq!(optimizer.lr(), kind.lr.with_model(ADAM_RATE));
            let graph = graph(&optimizer);
            kolo_graph::verify::verify(&graph).unwrap();
            let states: Vec<&str> = graph.sources::<State>().map(|(_, state)| state.name.as_str()).collect();
            assert!(states.iter().all(|name| name.starts_with("optim.")), "{}: {states:?}", kind.name);
            assert_eq!(graph.updates.len(), 2 + states.len(), "{}", kind.name);
            for grains in [1, 2] {
                let layout = kolo_graph::layout::plan(&graph, grains, 1, &kolo_exec::cpu::CpuAbilities);
                assert!(layout.copies.is_empty(), "{}: {:?} are not updated in place", kind.name, layout.copies);
            }
        }
    }

    #[test]
    fn only_matrices_decay() {
        let optimizer = Optimizer::read(&settings("adamw", &[("weight_decay", Setting::Float(0.5))])).unwrap();
        let graph = graph(&optimizer);
        let decays: Vec<(f64, usize)> = graph
            .nodes
            .iter()
            .filter_map(|node| Some((node.op.downcast::<Adam>()?.weight_decay, graph.ty(node.inputs[0]).rank())))
            .collect();
        assert_eq!(decays, [(0.5, 2), (0.0, 1)]);
    }

    #[test]
    fn momentum_decides_whether_there_is_a_velocity() {
        let states = |keys: &[(&str, Setting)]| {
            graph(&Optimizer::read(&settings("sgd", keys)).unwrap()).sources::<State>().count()
        };
        assert_eq!(states(&[]), 0);
        assert_eq!(states(&[("momentum", Setting::Float(0.9)), ("nesterov", Setting::Bool(true))]), 2);
    }

    #[test]
    fn wrong_settings_say_what_to_write() {
        let error =
            |kind: &str, keys: &[(&str, Setting)]| Optimizer::read(&settings(kind, keys)).unwrap_err().to_string();
        assert_eq!(
            error("adam", &[("momentum", Setting::Float(0.9))]),
            "job.toml:10: unknown key `train.optimizer.momentum`\n  \
             hint: the keys here are beta1, beta2, eps, kind, lr, weight_decay"
        );
        assert_eq!(
            error("adma", &[]),
            "job.toml:9: `train.optimizer.kind` is \"adma\", which is not known\n  \
             hint: did you mean \"adam\"? The choices are adamw, adam, sgd, lars, lamb, rmsprop, adagrad"
        );
        assert_eq!(
            error("sgd", &[("nesterov", Setting::Bool(true))]),
            "job.toml:10: `train.optimizer.nesterov` needs a momentum\n  \
             hint: write `momentum = 0.9`, or `nesterov = false`"
        );
        assert_eq!(
            error("adam", &[("beta2", Setting::Int(1))]),
            "job.toml:10: `train.optimizer.beta2` must be less than 1\n  hint: write `beta2 = 0.999`"
        );
    }
}
