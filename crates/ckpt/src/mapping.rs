//! What other libraries call the tensors of a model: one table per architecture, read in both directions.
//!
//! kolo's own names and layouts are PyTorch's and Hugging Face's already, so the tables are short. `*` stands for any text,
//! the same on both sides.

use serde_json::{Value, json};

/// Whose names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Hugging Face's `transformers`.
    Hf,
    /// PyTorch's state dicts; torchvision's where it has the model.
    Torch,
}

/// How the values of a tensor lie there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Same,
    /// A matrix whose dims are swapped.
    Transposed,
}

#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub ours: &'static str,
    pub theirs: &'static str,
    pub layout: Layout,
}

/// A tensor that they have and kolo has not.
#[derive(Clone, Copy, Debug)]
pub enum Extra {
    /// Says nothing about the model.
    Ignored(&'static str),
    /// Must be the same values as another of theirs.
    Tied(&'static str, &'static str),
    /// Counts batches, of a batch norm whose running mean is called so; nothing depends on it.
    Counter { counter: &'static str, mean: &'static str },
}

/// A model as another library writes it.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// What its users call it.
    pub name: &'static str,
    /// Kinds of kolo's models.
    pub kinds: &'static [&'static str],
    pub target: Target,
    pub rows: &'static [Row],
    pub extras: &'static [Extra],
    /// Tensors of ours that must have these sizes (0: any), and what to do otherwise.
    pub shapes: &'static [(&'static str, &'static [usize], &'static str)],
    /// Keys of their `config.json` and what kolo's model does.
    pub config: &'static [(&'static str, Config)],
    /// The class and the type in that file.
    pub class: (&'static str, &'static str),
    /// Whether the head is the embedding of tokens; `None` if this is about all models of these kinds.
    pub tied: Option<bool>,
}

/// What a key of `config.json` must say.
#[derive(Clone, Copy, Debug)]
pub enum Config {
    /// One of these texts, all of which mean the same; the first is what we write.
    OneOf(&'static [&'static str]),
    Number(f64),
    Flag(bool),
    /// The number that the job has under this key.
    Setting(&'static str),
    /// The same of a number with a fraction. Where the file does not say, it means this one.
    FractionOr(&'static str, f64),
    /// Not less than that number.
    AtLeast(&'static str),
    /// The same, or nothing: no limit.
    NothingOrAtLeast(&'static str),
    /// Rotary positions to the base that the job has under this key, not scaled. The key is that of newer files; older ones have
    /// `ROPE_BASE` and `ROPE_SCALING`.
    Rotary(&'static str),
    /// Nothing, or four times the width.
    FourTimesWidth,
}

const ROPE_BASE: &str = "rope_theta";
/// What a file without that key means.
const ROPE_BASE_USUAL: f64 = 10_000.0;
const ROPE_SCALING: &str = "rope_scaling";
const ROPE_TYPE: &str = "rope_type";
/// What kolo's models had before it was a key of theirs.
const FRACTION_BEFORE: f64 = 1e-5;
const NO_CLASS: (&str, &str) = ("", "");

const fn same(ours: &'static str, theirs: &'static str) -> Row {
    Row { ours, theirs, layout: Layout::Same }
}

const fn transposed(ours: &'static str, theirs: &'static str) -> Row {
    Row { ours, theirs, layout: Layout::Transposed }
}

const GPT2_CLASS: (&str, &str) = ("GPT2LMHeadModel", "gpt2");

const fn gpt2_config(tied: bool) -> [(&'static str, Config); 13] {
    [
        ("model_type", Config::OneOf(&["gpt2"])),
        // The second is another name of the same function.
        ("activation_function", Config::OneOf(&["gelu_new", "gelu_pytorch_tanh"])),
        ("layer_norm_epsilon", Config::Number(1e-5)),
        ("scale_attn_weights", Config::Flag(true)),
        ("scale_attn_by_inverse_layer_idx", Config::Flag(false)),
        ("add_cross_attention", Config::Flag(false)),
        ("tie_word_embeddings", Config::Flag(tied)),
        ("n_inner", Config::FourTimesWidth),
        ("n_head", Config::Setting("model.heads")),
        ("n_layer", Config::Setting("model.layers")),
        ("n_embd", Config::Setting("model.width")),
        ("n_positions", Config::Setting("model.context")),
        ("vocab_size", Config::Setting("model.vocab")),
    ]
}

const GPT2_EXTRAS: &[Extra] = &[
    Extra::Tied("lm_head.weight", "transformer.wte.weight"),
    Extra::Ignored("transformer.h.*.attn.bias"),
    Extra::Ignored("transformer.h.*.attn.masked_bias"),
];

const GPT2_MASKS: &[Extra] =
    &[Extra::Ignored("transformer.h.*.attn.bias"), Extra::Ignored("transformer.h.*.attn.masked_bias")];

/// `GPT2LMHeadModel`. Its `Conv1D` keeps `[in, out]`, as kolo does, and queries, keys and values are one matrix in both.
const GPT2: Architecture = Architecture {
    name: "GPT2LMHeadModel of transformers",
    kinds: &["gpt"],
    target: Target::Hf,
    rows: &[
        same("wte.weight", "transformer.wte.weight"),
        same("wpe.weight", "transformer.wpe.weight"),
        same("h.*.ln_1.*", "transformer.h.*.ln_1.*"),
        same("h.*.attn.c_attn.*", "transformer.h.*.attn.c_attn.*"),
        same("h.*.attn.c_proj.*", "transformer.h.*.attn.c_proj.*"),
        same("h.*.ln_2.*", "transformer.h.*.ln_2.*"),
        same("h.*.mlp.c_fc.*", "transformer.h.*.mlp.c_fc.*"),
        same("h.*.mlp.c_proj.*", "transformer.h.*.mlp.c_proj.*"),
        same("ln_f.*", "transformer.ln_f.*"),
    ],
    extras: GPT2_EXTRAS,
    shapes: &[],
    config: &gpt2_config(true),
    class: GPT2_CLASS,
    tied: Some(true),
};

/// The same with a head of its own.
const GPT2_UNTIED: Architecture = Architecture {
    name: "GPT2LMHeadModel of transformers with a head of its own",
    rows: &[
        same("wte.weight", "transformer.wte.weight"),
        same("wpe.weight", "transformer.wpe.weight"),
        same("h.*.ln_1.*", "transformer.h.*.ln_1.*"),
        same("h.*.attn.c_attn.*", "transformer.h.*.attn.c_attn.*"),
        same("h.*.attn.c_proj.*", "transformer.h.*.attn.c_proj.*"),
        same("h.*.ln_2.*", "transformer.h.*.ln_2.*"),
        same("h.*.mlp.c_fc.*", "transformer.h.*.mlp.c_fc.*"),
        same("h.*.mlp.c_proj.*", "transformer.h.*.mlp.c_proj.*"),
        same("ln_f.*", "transformer.ln_f.*"),
        same("lm_head.weight", "lm_head.weight"),
    ],
    extras: GPT2_MASKS,
    config: &gpt2_config(false),
    tied: Some(false),
    ..GPT2
};

/// `GPT2Model`, and the files of the first GPT-2: the same without a head and its prefix.
const GPT2_BARE: Architecture = Architecture {
    name: "GPT2Model of transformers",
    kinds: &["gpt"],
    target: Target::Hf,
    rows: &[
        same("wte.weight", "wte.weight"),
        same("wpe.weight", "wpe.weight"),
        same("h.*.ln_1.*", "h.*.ln_1.*"),
        same("h.*.attn.c_attn.*", "h.*.attn.c_attn.*"),
        same("h.*.attn.c_proj.*", "h.*.attn.c_proj.*"),
        same("h.*.ln_2.*", "h.*.ln_2.*"),
        same("h.*.mlp.c_fc.*", "h.*.mlp.c_fc.*"),
        same("h.*.mlp.c_proj.*", "h.*.mlp.c_proj.*"),
        same("ln_f.*", "ln_f.*"),
    ],
    extras: &[
        Extra::Tied("lm_head.weight", "wte.weight"),
        Extra::Ignored("h.*.attn.bias"),
        Extra::Ignored("h.*.attn.masked_bias"),
    ],
    shapes: &[],
    config: &gpt2_config(true),
    class: GPT2_CLASS,
    tied: Some(true),
};

/// The same model of `torch.nn.Linear`, which keeps `[out, in]`, as nanoGPT and its kin write it.
const GPT2_LINEAR: Architecture = Architecture {
    name: "GPT-2 of torch.nn.Linear layers",
    kinds: &["gpt"],
    target: Target::Torch,
    rows: &[
        same("wte.weight", "transformer.wte.weight"),
        same("wpe.weight", "transformer.wpe.weight"),
        transposed("h.*.attn.c_attn.weight", "transformer.h.*.attn.c_attn.weight"),
        transposed("h.*.attn.c_proj.weight", "transformer.h.*.attn.c_proj.weight"),
        transposed("h.*.mlp.c_fc.weight", "transformer.h.*.mlp.c_fc.weight"),
        transposed("h.*.mlp.c_proj.weight", "transformer.h.*.mlp.c_proj.weight"),
        same("h.*.bias", "transformer.h.*.bias"),
        same("h.*.ln_1.weight", "transformer.h.*.ln_1.weight"),
        same("h.*.ln_2.weight", "transformer.h.*.ln_2.weight"),
        same("ln_f.*", "transformer.ln_f.*"),
    ],
    extras: GPT2_EXTRAS,
    shapes: &[],
    config: &[],
    class: NO_CLASS,
    tied: Some(true),
};

/// Those with a head of its own.
const GPT2_LINEAR_UNTIED: Architecture = Architecture {
    name: "GPT-2 of torch.nn.Linear layers with a head of its own",
    rows: &[
        same("wte.weight", "transformer.wte.weight"),
        same("wpe.weight", "transformer.wpe.weight"),
        transposed("h.*.attn.c_attn.weight", "transformer.h.*.attn.c_attn.weight"),
        transposed("h.*.attn.c_proj.weight", "transformer.h.*.attn.c_proj.weight"),
        transposed("h.*.mlp.c_fc.weight", "transformer.h.*.mlp.c_fc.weight"),
        transposed("h.*.mlp.c_proj.weight", "transformer.h.*.mlp.c_proj.weight"),
        same("h.*.bias", "transformer.h.*.bias"),
        same("h.*.ln_1.weight", "transformer.h.*.ln_1.weight"),
        same("h.*.ln_2.weight", "transformer.h.*.ln_2.weight"),
        same("ln_f.*", "transformer.ln_f.*"),
        same("lm_head.weight", "lm_head.weight"),
    ],
    extras: GPT2_MASKS,
    tied: Some(false),
    ..GPT2_LINEAR
};

/// `LlamaForCausalLM`, whose names kolo's model has.
const LLAMA: Architecture = Architecture {
    name: "LlamaForCausalLM of transformers",
    kinds: &["llama"],
    target: Target::Hf,
    rows: &[
        same("model.embed_tokens.weight", "model.embed_tokens.weight"),
        same("model.layers.*.weight", "model.layers.*.weight"),
        same("model.norm.weight", "model.norm.weight"),
        same("lm_head.weight", "lm_head.weight"),
    ],
    extras: &[Extra::Ignored("model.layers.*.self_attn.rotary_emb.inv_freq")],
    shapes: &[],
    config: &[
        // Others have the same tensors and compute something else with them; a Mistral does not.
        ("model_type", Config::OneOf(&["llama", "mistral"])),
        ("sliding_window", Config::NothingOrAtLeast("model.context")),
        ("hidden_act", Config::OneOf(&["silu", "swish"])),
        ("rms_norm_eps", Config::FractionOr("model.norm_eps", 1e-6)),
        ("attention_bias", Config::Flag(false)),
        ("mlp_bias", Config::Flag(false)),
        ("tie_word_embeddings", Config::Flag(false)),
        ("num_attention_heads", Config::Setting("model.heads")),
        ("num_key_value_heads", Config::Setting("model.kv_heads")),
        ("num_hidden_layers", Config::Setting("model.layers")),
        ("hidden_size", Config::Setting("model.width")),
        ("intermediate_size", Config::Setting("model.hidden")),
        ("max_position_embeddings", Config::AtLeast("model.context")),
        ("vocab_size", Config::Setting("model.vocab")),
        ("rope_parameters", Config::Rotary("model.rope")),
    ],
    class: ("LlamaForCausalLM", "llama"),
    tied: None,
};

const RESNET: Architecture = Architecture {
    name: "ResNet of torchvision",
    kinds: &["resnet18", "resnet50", "resnet101", "resnet152"],
    target: Target::Torch,
    rows: &[
        same("conv1.weight", "conv1.weight"),
        same("bn1.*", "bn1.*"),
        same("layer*.conv*.weight", "layer*.conv*.weight"),
        same("layer*.bn*", "layer*.bn*"),
        same("layer*.downsample.*", "layer*.downsample.*"),
        same("fc.*", "fc.*"),
    ],
    extras: &[Extra::Counter { counter: "*.num_batches_tracked", mean: "*.running_mean" }],
    shapes: &[(
        "conv1.weight",
        &[64, 0, 7, 7],
        "torchvision's stem has 64 filters of 7×7 pixels: leave `width` at 64; kolo's model has a different stem for images below \
         64 pixels; the names without `--to` are the same, and in PyTorch \
         `conv1` must be a 3×3 convolution and `maxpool` nothing",
    )],
    config: &[],
    class: NO_CLASS,
    tied: None,
};

const ALEXNET: Architecture = Architecture {
    name: "AlexNet of torchvision",
    kinds: &["alexnet"],
    target: Target::Torch,
    rows: &[same("features.*", "features.*"), same("classifier.*", "classifier.*")],
    extras: &[],
    shapes: &[],
    config: &[],
    class: NO_CLASS,
    tied: None,
};

const VGG: Architecture = Architecture { name: "VGG of torchvision", kinds: &["vgg16"], ..ALEXNET };

/// Without its auxiliary classifier, which only training needs.
const INCEPTION: Architecture = Architecture {
    name: "Inception V3 of torchvision",
    kinds: &["inception_v3"],
    target: Target::Torch,
    rows: &[same("*", "*")],
    extras: &[
        Extra::Counter { counter: "*.num_batches_tracked", mean: "*.running_mean" },
        Extra::Ignored("AuxLogits.*"),
    ],
    shapes: &[],
    config: &[],
    class: NO_CLASS,
    tied: None,
};

/// Models whose names are those of a state dict already.
const PLAIN: Architecture = Architecture {
    name: "a PyTorch state dict of kolo's names",
    kinds: &["mlp", "cnn", "lstm"],
    target: Target::Torch,
    rows: &[same("*", "*")],
    extras: &[],
    shapes: &[],
    config: &[],
    class: NO_CLASS,
    tied: None,
};

/// Any model under the names that kolo gives it.
pub const OWN: Architecture = Architecture { name: "kolo's names", kinds: &[], ..PLAIN };

/// Every architecture. The first that is of a model and a target is the one to write.
pub const ARCHITECTURES: &[Architecture] =
    &[GPT2, GPT2_UNTIED, GPT2_BARE, GPT2_LINEAR, GPT2_LINEAR_UNTIED, LLAMA, RESNET, ALEXNET, VGG, INCEPTION, PLAIN];

fn setting<'s>(settings: &'s [(String, String)], key: &str) -> Option<&'s str> {
    settings.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
}

impl Architecture {
    /// Whether a job's model is written so. `settings` are the job's; heads are tied where it does not say.
    pub fn is_of(&self, kind: &str, settings: &[(String, String)]) -> bool {
        let tied = setting(settings, "model.tied").is_none_or(|tied| tied == "true");
        self.kinds.contains(&kind) && self.tied.is_none_or(|own| own == tied)
    }

    /// The name that a tensor of ours has there.
    pub fn theirs(&self, ours: &str) -> Option<(String, Layout)> {
        self.rows.iter().find_map(|row| Some((fill(row.theirs, &captures(row.ours, ours)?), row.layout)))
    }

    /// The tensor of ours that one of theirs is.
    pub fn ours(&self, theirs: &str) -> Option<(String, Layout)> {
        self.rows.iter().find_map(|row| Some((fill(row.ours, &captures(row.theirs, theirs)?), row.layout)))
    }

    /// What one of theirs is that kolo has not.
    pub fn extra(&self, theirs: &str) -> Option<&Extra> {
        self.extras.iter().find(|extra| match extra {
            Extra::Ignored(pattern) | Extra::Tied(pattern, _) => captures(pattern, theirs).is_some(),
            Extra::Counter { counter, .. } => captures(counter, theirs).is_some(),
        })
    }

    /// The counter that they have beside this tensor of theirs.
    pub fn counter_beside(&self, theirs: &str) -> Option<String> {
        self.extras.iter().find_map(|extra| match extra {
            Extra::Counter { counter, mean } => Some(fill(counter, &captures(mean, theirs)?)),
            _ => None,
        })
    }

    /// Why a tensor of ours cannot be one of theirs, if its shape forbids it.
    pub fn refuses_shape(&self, ours: &str, shape: &[usize]) -> Option<String> {
        let (_, wanted, hint) = self.shapes.iter().find(|(name, ..)| *name == ours)?;
        let fits =
            wanted.len() == shape.len() && wanted.iter().zip(shape).all(|(want, size)| *want == 0 || want == size);
        (!fits).then(|| (*hint).to_owned())
    }

    /// What a `config.json` says that kolo's model does not do. `settings` are the job's.
    pub fn refuses_config(&self, config: &Value, settings: &[(String, String)]) -> Vec<String> {
        let setting = |key: &str| setting(settings, key);
        let wrong = |(key, wanted): &(&str, Config)| {
            if let Config::Rotary(name) = wanted {
                return refuses_rotary(key, config, setting(name)?);
            }
            let stated = config.get(key).filter(|stated| !stated.is_null());
            if let Config::FractionOr(name, meant) = wanted {
                return refuses_fraction(key, stated, (*meant, format!("{meant:e}")), (name, setting(name)?));
            }
            let stated = stated?;
            let (fits, wanted) = match wanted {
                Config::OneOf(texts) => {
                    (stated.as_str().is_some_and(|stated| texts.contains(&stated)), format!("\"{}\"", texts[0]))
                }
                Config::Number(number) => (stated.as_f64() == Some(*number), format!("{number:e}")),
                Config::Flag(flag) => (stated.as_bool() == Some(*flag), flag.to_string()),
                Config::Setting(name) => {
                    let ours = setting(name)?;
                    // A JSON value is no text, but is written as one.
                    let stated = stated.to_string();
                    (stated == ours, format!("`{name} = {ours}`"))
                }
                Config::AtLeast(name) | Config::NothingOrAtLeast(name) => {
                    let ours = setting(name)?;
                    let fits = stated.as_u64().zip(ours.parse().ok()).is_some_and(|(stated, ours)| stated >= ours);
                    (fits, format!("`{name} = {ours}`"))
                }
                Config::Rotary(_) | Config::FractionOr(..) => return None,
                Config::FourTimesWidth => {
                    let width = config.get("n_embd").and_then(Value::as_u64).map(|width| 4 * width);
                    (stated.as_u64() == width, "four times the width".into())
                }
            };
            (!fits).then(|| format!("`{key}` is {stated}, but kolo's model has {wanted}"))
        };
        self.config.iter().filter_map(wrong).collect()
    }

    /// A `config.json` for a model of these settings, if the library has such a file and the settings say enough.
    pub fn config_of(&self, settings: &[(String, String)]) -> Option<Value> {
        if self.config.is_empty() {
            return None;
        }
        let (class, kind) = self.class;
        let mut config = json!({ "architectures": [class], "model_type": kind });
        for (key, wanted) in self.config {
            config[*key] = match wanted {
                Config::OneOf(texts) => json!(texts[0]),
                Config::Number(number) => json!(number),
                Config::Flag(flag) => json!(flag),
                Config::Setting(name) | Config::AtLeast(name) => json!(setting(settings, name)?.parse::<u64>().ok()?),
                Config::FractionOr(name, _) => match setting(settings, name) {
                    Some(ours) => json!(ours.parse::<f64>().ok()?),
                    None => json!(FRACTION_BEFORE),
                },
                Config::Rotary(name) => {
                    let base: f64 = setting(settings, name)?.parse().ok()?;
                    config[ROPE_BASE] = json!(base);
                    json!({ ROPE_BASE: base, ROPE_TYPE: "default" })
                }
                Config::FourTimesWidth | Config::NothingOrAtLeast(_) => Value::Null,
            };
        }
        Some(config)
    }
}

/// What a `config.json` says of rotary positions that kolo's model does not do.
fn refuses_rotary(key: &str, config: &Value, base: &str) -> Option<String> {
    let is_said = |stated: &&Value| !stated.is_null();
    let newer = config.get(key).filter(is_said);
    let mut tables = newer.into_iter().chain(config.get(ROPE_SCALING).filter(is_said));
    let scales = |table: &Value| match table.get(ROPE_TYPE).or(table.get("type")) {
        Some(kind) => kind.as_str() != Some("default"),
        None => table.get("factor").is_some(),
    };
    if let Some(scaling) = tables.find(|table| scales(table)) {
        return Some(format!("the positions are scaled ({scaling}), which kolo's model does not do"));
    }
    let stated = newer.and_then(|stated| stated.get(ROPE_BASE)).or(config.get(ROPE_BASE)).filter(is_said);
    refuses_fraction(ROPE_BASE, stated, (ROPE_BASE_USUAL, ROPE_BASE_USUAL.to_string()), ("model.rope", base))
}

/// Why a number of a file, or what it means where the file does not say, is not that of this setting.
fn refuses_fraction(
    key: &str,
    stated: Option<&Value>,
    (meant, meant_text): (f64, String),
    (name, ours): (&str, &str),
) -> Option<String> {
    let number = stated.map_or(Some(meant), Value::as_f64);
    let fits = number.zip(ours.parse().ok()).is_some_and(|(number, ours): (f64, f64)| number == ours);
    (!fits).then(|| {
        let said = stated.map_or(format!("missing, which means {meant_text}"), Value::to_string);
        format!("`{key}` is {said}, but kolo's model has `{name} = {ours}`")
    })
}

/// What each `*` of a pattern stands for in a text, if it fits. Earlier ones take as little as they can.
fn captures<'t>(pattern: &str, text: &'t str) -> Option<Vec<&'t str>> {
    let Some((head, rest)) = pattern.split_once('*') else {
        return (pattern == text).then(Vec::new);
    };
    let text = text.strip_prefix(head)?;
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    for end in ends {
        let (taken, left) = text.split_at(end);
        if let Some(mut found) = captures(rest, left) {
            found.insert(0, taken);
            return Some(found);
        }
    }
    None
}

fn fill(pattern: &str, captures: &[&str]) -> String {
    let mut parts = captures.iter();
    pattern.split('*').enumerate().fold(String::new(), |text, (at, piece)| match at {
        0 => piece.to_owned(),
        _ => text + parts.next().unwrap_or(&"") + piece,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_the_same_text_on_both_sides() {
        assert_eq!(captures("h.*.ln_1.*", "h.11.ln_1.weight"), Some(vec!["11", "weight"]));
        assert_eq!(captures("h.*", "h."), None);
        assert_eq!(captures("a", "b"), None);
        assert_eq!(fill("transformer.h.*.ln_1.*", &["11", "weight"]), "transformer.h.11.ln_1.weight");
        let (ours, layout) = GPT2_LINEAR.ours("transformer.h.3.mlp.c_fc.weight").unwrap();
        assert_eq!((ours.as_str(), layout), ("h.3.mlp.c_fc.weight", Layout::Transposed));
        assert_eq!(GPT2_LINEAR.ours("transformer.h.3.mlp.c_fc.bias").unwrap().1, Layout::Same);
        assert_eq!(GPT2.theirs("optim.wte.weight.m"), None);
        assert!(RESNET.extra("layer1.0.bn2.num_batches_tracked").is_some());
        assert_eq!(RESNET.counter_beside("bn1.running_mean").as_deref(), Some("bn1.num_batches_tracked"));
    }

    #[test]
    fn what_a_config_says_otherwise_is_named() {
        let settings = [("model.heads".to_owned(), "4".to_owned())];
        let config = json!({ "activation_function": "relu", "layer_norm_epsilon": 1e-5, "n_head": 2, "n_inner": null });
        let wrong = GPT2.refuses_config(&config, &settings);
        let wanted = [
            "`activation_function` is \"relu\", but kolo's model has \"gelu_new\"",
            "`n_head` is 2, but kolo's model has `model.heads = 4`",
        ];
        assert_eq!(wrong, wanted);
        let settings = |rope: &str, norm_eps: &str| {
            [("model.rope", rope), ("model.context", "64"), ("model.norm_eps", norm_eps)]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
        };
        let positions = |config: Value| LLAMA.refuses_config(&config, &settings("10000", "0.000001")).join("; ");
        for fine in [
            json!({ "rope_theta": 10_000.0, "rope_scaling": null, "max_position_embeddings": 2048 }),
            json!({ "rope_parameters": { "rope_theta": 1e4, "rope_type": "default" }, "max_position_embeddings": 64 }),
            json!({}),
            json!({ "model_type": "mistral", "sliding_window": null, "hidden_act": "swish" }),
            json!({ "model_type": "mistral", "sliding_window": 4096 }),
        ] {
            assert_eq!(positions(fine), "");
        }
        for (wrong, wanted) in [
            (json!({ "rope_theta": 5e5 }), "`rope_theta` is 500000.0, but kolo's model has `model.rope = 10000`"),
            (json!({ "rope_scaling": { "factor": 8.0 } }), "the positions are scaled ({\"factor\":8.0})"),
            (
                json!({ "rope_parameters": { "rope_type": "llama3" } }),
                "the positions are scaled ({\"rope_type\":\"llama3\"})",
            ),
            (json!({ "rope_scaling": { "type": "linear" }, "rope_theta": 1e4 }), "the positions are scaled"),
            (
                json!({ "rope_parameters": { "rope_type": "default" }, "rope_scaling": { "rope_type": "yarn" } }),
                "the positions are scaled",
            ),
            (
                json!({ "rms_norm_eps": 1e-5 }),
                "`rms_norm_eps` is 0.00001, but kolo's model has `model.norm_eps = 0.000001`",
            ),
            (json!({ "max_position_embeddings": 32 }), "is 32, but kolo's model has `model.context = 64`"),
            (json!({ "model_type": "granite" }), "`model_type` is \"granite\", but kolo's model has \"llama\""),
            (
                json!({ "model_type": "mistral", "sliding_window": 32 }),
                "`sliding_window` is 32, but kolo's model has `model.context = 64`",
            ),
        ] {
            let said = positions(wrong);
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        // What a file does not say has the values that it means.
        let said = LLAMA.refuses_config(&json!({ "rope_theta": null }), &settings("50000", "1e-5"));
        let wanted = [
            "`rms_norm_eps` is missing, which means 1e-6, but kolo's model has `model.norm_eps = 1e-5`",
            "`rope_theta` is missing, which means 10000, but kolo's model has `model.rope = 50000`",
        ];
        assert_eq!(said, wanted);
    }

    #[test]
    fn a_head_of_its_own_has_a_table_of_its_own() {
        let named = |tied: Option<&str>, target: Target| {
            let settings: Vec<(String, String)> =
                tied.map(|tied| ("model.tied".into(), tied.into())).into_iter().collect();
            let found = ARCHITECTURES.iter().find(|one| one.is_of("gpt", &settings) && one.target == target);
            found.unwrap().theirs("lm_head.weight").is_some()
        };
        for target in [Target::Hf, Target::Torch] {
            assert_eq!([None, Some("true"), Some("false")].map(|tied| named(tied, target)), [false, false, true]);
        }
    }
}
