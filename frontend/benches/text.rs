//! The text side of a request: template and tokenizer once, detokenizer and stop strings per token.
//!
//! Run with `cargo bench -p genset-frontend --bench text`. Elements are tokens for `detokenize` and `prefix`, bytes of
//! text for `stop` and for `prompt`.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::measurement::WallTime;
use criterion::{
    BatchSize, BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main,
};
use genset_frontend::text::{
    ChatTemplate, Detokenizer, EncodeLimits, StopMatcher, TemplateInput, TextTokenizer,
};
use serde_json::{Map, Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::Metaspace;
use tokenizers::{AddedToken, Tokenizer};

const PARAGRAPH: &str = "A genset is an engine plus everything around it that delivers power: frame, \
    starter, governor and panel. The engine turns fuel into motion; the rest makes that motion useful, \
    safe and steady. It doesn't care what you plug in. Größe zählt nicht, 電力は流れる、 и свет горит 💡🔌.\n\n";

fn trained(pre: impl Into<PreTokenizerWrapper>, trainer: BpeTrainer) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(ModelWrapper::from(BPE::default()));
    tokenizer.with_pre_tokenizer(Some(pre));
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), [PARAGRAPH].iter())
        .unwrap();
    tokenizer
}

fn byte_level_json() -> Value {
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainer::builder()
        .vocab_size(400)
        .show_progress(false)
        .initial_alphabet(alphabet);
    let mut tokenizer = trained(ByteLevel::new(false, true, true), trainer.build());
    tokenizer.with_decoder(Some(ByteLevel::default()));
    serde_json::to_value(&tokenizer).unwrap()
}

/// Like Llama 2, with byte tokens for what the vocabulary lacks.
fn sentence_piece_json() -> Value {
    let bytes = (0..=u8::MAX).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false));
    let trainer = BpeTrainer::builder()
        .vocab_size(500)
        .show_progress(false)
        .limit_alphabet(60)
        .special_tokens(bytes.collect());
    let tokenizer = trained(Metaspace::default(), trainer.build());
    let mut json = serde_json::to_value(&tokenizer).unwrap();
    json["added_tokens"] = json!([]);
    json["model"]["byte_fallback"] = true.into();
    json["decoder"] = json!({ "type": "Sequence", "decoders": [
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
        { "type": "ByteFallback" }, { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
    ] });
    json
}

fn load(json: &Value) -> Arc<TextTokenizer> {
    Arc::new(TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}

/// A server's start: parses a vocabulary of usual size and prepares its pieces.
fn load_150k(c: &mut Criterion) {
    let mut json = byte_level_json();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for id in vocab.len()..150_000 {
        vocab.insert(format!("Ġword{id}"), id.into());
    }
    let json = json.to_string();
    let mut group = c.benchmark_group("load");
    group.sample_size(10);
    group.bench_function("tokenizer_150k_tokens", |b| {
        b.iter(|| TextTokenizer::from_bytes(json.as_bytes()).unwrap());
    });
    group.bench_function("tokenizer_150k_tokens/tokenizers_alone", |b| {
        b.iter(|| Tokenizer::from_bytes(json.as_bytes()).unwrap());
    });
    group.finish();
}

fn detokenize(c: &mut Criterion) {
    let mut group = c.benchmark_group("detokenize");
    let text = PARAGRAPH.repeat(10);
    for (name, json) in [
        ("byte_level", byte_level_json()),
        ("byte_fallback", sentence_piece_json()),
    ] {
        let tokenizer = load(&json);
        let ids = tokenizer.encode(&text, false).unwrap();
        group.throughput(Throughput::Elements(ids.len() as u64));
        let mut out = String::with_capacity(64);
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
                for &id in &ids {
                    out.clear();
                    detokenizer.push(id, &mut out);
                    black_box(out.as_str());
                }
            });
        });
        // The `tokenizers` crate's own solution.
        let crates_own: Tokenizer = serde_json::from_value(json).unwrap();
        group.bench_function(format!("{name}/tokenizers_decode_stream"), |b| {
            b.iter(|| {
                let mut stream = crates_own.decode_stream(true);
                for &id in &ids {
                    black_box(stream.step(id).unwrap());
                }
            });
        });
    }
    group.finish();
}

fn stop(c: &mut Criterion) {
    let mut group = c.benchmark_group("stop");
    let text = PARAGRAPH.repeat(10);
    let tokenizer = load(&byte_level_json());
    let ids = tokenizer.encode(&text, false).unwrap();
    let mut detokenizer = Detokenizer::new(tokenizer, true);
    let parts: Vec<String> = ids
        .iter()
        .map(|&id| {
            let mut part = String::new();
            detokenizer.push(id, &mut part);
            part
        })
        .collect();
    group.throughput(Throughput::Elements(text.len() as u64));
    let four = ["\n\nUser:", "</answer>", "that delivers no", "<|im_end|>"];
    for (name, stops) in [("none", &four[..0]), ("one", &four[..1]), ("four", &four)] {
        let stops: Arc<[String]> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut out = String::with_capacity(64);
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut matcher = StopMatcher::new(Arc::clone(&stops));
                for part in &parts {
                    out.clear();
                    let _ = black_box(matcher.push(part, &mut out));
                    black_box(out.as_str());
                }
            });
        });
    }
    group.finish();
}

const TEMPLATE: &str = r"
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- if tools %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1].lstrip('\n') }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
";

fn messages() -> Vec<Value> {
    let roles = ["user", "assistant"].iter().cycle().take(10);
    roles
        .map(|role| json!({ "role": role, "content": PARAGRAPH }))
        .collect()
}

fn prompt(c: &mut Criterion) {
    let template = ChatTemplate::try_new(TEMPLATE, None, None).unwrap();
    let json = byte_level_json();
    let tokenizer = load(&json);
    let crates_own: Tokenizer = serde_json::from_value(json).unwrap();
    let messages = messages();
    let input = TemplateInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        extra: &Map::new(),
    };
    let text = template.render(&input).unwrap();
    let mut group = c.benchmark_group("prompt");
    group.throughput(Throughput::Elements(text.len() as u64));
    group.bench_function("render_10_messages", |b| {
        b.iter(|| black_box(template.render(&input).unwrap()));
    });
    group.bench_function("tokenize_10_messages", |b| {
        b.iter(|| black_box(tokenizer.encode(&text, false).unwrap()));
    });
    // The library call alone.
    group.bench_function("tokenize_10_messages/tokenizers_alone", |b| {
        b.iter(|| black_box(crates_own.encode_fast(text.as_str(), false).unwrap()));
    });
    group.bench_function("render_and_tokenize_10_messages", |b| {
        b.iter(|| {
            let text = template.render(&input).unwrap();
            black_box(tokenizer.encode(&text, false).unwrap())
        });
    });
    group.finish();
}

/// With the tokens that begin and end a message.
fn chat_json() -> Value {
    let mut json = byte_level_json();
    let next = json["model"]["vocab"].as_object().unwrap().len();
    let added = ["<|im_start|>", "<|im_end|>"].iter().enumerate();
    json["added_tokens"] = added
        .map(|(index, content)| {
            json!({ "id": next + index, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false })
        })
        .collect();
    json
}

/// Conversations of ten messages and 8,000 tokens, as a template renders them.
struct Conversations {
    content: String,
    mark: u64,
}

impl Conversations {
    fn new(tokenizer: &TextTokenizer) -> Self {
        let paragraph = tokenizer.encode(PARAGRAPH, false).unwrap().len();
        Self {
            content: PARAGRAPH.repeat(800 / paragraph),
            mark: 0,
        }
    }

    /// All messages differ. `first_mark` marks the first nine messages, `last_mark` the last.
    fn text(&self, first_mark: u64, last_mark: u64) -> String {
        let content = &self.content;
        let message = |turn: usize| {
            let mark = if turn == 9 { last_mark } else { first_mark };
            let role = ["user", "assistant"][turn % 2];
            format!("<|im_start|>{role}\n{mark}.{turn} {content}<|im_end|>\n")
        };
        let messages: String = (0..10).map(message).collect();
        messages + "<|im_start|>assistant\n"
    }

    fn known(&self) -> String {
        self.text(0, 0)
    }

    fn with_new_last(&mut self) -> String {
        self.mark += 1;
        self.text(0, self.mark)
    }

    fn new_throughout(&mut self) -> String {
        self.mark += 1;
        self.text(self.mark, self.mark)
    }
}

/// Tokenizes a conversation with and without the prefix cache.
fn prefix(c: &mut Criterion) {
    let json = chat_json();
    let plain = load(&json);
    let cached = TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let cached = cached.with_cache(16 << 20);
    let mut conversations = Conversations::new(&plain);
    let known = conversations.known();
    let tokens = plain.encode(&known, false).unwrap();
    let mut group = c.benchmark_group("prefix");
    group.throughput(Throughput::Elements(tokens.len() as u64));
    let mut of_new = |name, make: fn(&mut Conversations) -> String, encode: Encode<'_>| {
        bench_new(&mut group, name, || make(&mut conversations), encode);
    };
    let uncached: Encode<'_> = &|text| plain.encode(text, false).unwrap();
    let with_cache: Encode<'_> = &|text| {
        cached
            .encode_prompt(text, false, &EncodeLimits::NONE)
            .unwrap()
            .ids
    };
    let new_last = Conversations::with_new_last;
    of_new("8000_tokens_last_message_new/uncached", new_last, uncached);
    of_new("8000_tokens_last_message_new/cached", new_last, with_cache);
    let new_throughout = Conversations::new_throughout;
    of_new("8000_tokens_all_new/uncached", new_throughout, uncached);
    of_new("8000_tokens_all_new/cached", new_throughout, with_cache);
    group.bench_function("8000_tokens_all_known/cached", |b| {
        b.iter(|| black_box(with_cache(&known)));
    });
    group.finish();
}

type Encode<'a> = &'a dyn Fn(&str) -> Vec<u32>;

/// Measures `encode` alone, with a new text each time.
fn bench_new(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    mut make: impl FnMut() -> String,
    encode: Encode<'_>,
) {
    group.bench_function(name, |b| {
        b.iter_batched(&mut make, |text| encode(&text), BatchSize::SmallInput);
    });
}

criterion_group!(benches, load_150k, detokenize, stop, prompt, prefix);
criterion_main!(benches);
