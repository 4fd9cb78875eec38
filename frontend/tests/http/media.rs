//! Images and audio in chats: an engine that supports them gets the messages; one that does not says so by name.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use genset_backend_common::MetricsRegistry;
use genset_backend_common::output::{self, Finish};
use genset_backend_common::request::MediaKind;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, Input, LLMEngine, OutputStream,
    RequestContext, StartContext, async_trait,
    config::{InputKind, no_media},
};
use genset_frontend::{FrontendConfig, FrontendServer, MediaConfig};
use genset_runtime::Runtime;
use genset_runtime::discovery::MemoryDiscovery;
use genset_runtime::plane::{TcpConfig, WireConfig, WirePlane};
use serde_json::{Value, json};

use crate::client::{Client, post, soon};
use crate::support::{
    CHAT, CONTEXT, MODEL, Site, config, echo, echo_text, encode, start_worker, with_template,
    worker_config,
};

const GIF: &str = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
const WAV: &str = "UklGRgAAAABXQVZFZm10IA==";

/// Tokens that one medium takes in its prompts.
const A_MEDIUM: u32 = 7;

/// An engine that reports the media and the kind of request that it received.
struct Seeing;

#[async_trait]
impl LLMEngine for Seeing {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut can = Capabilities::tokens();
        can.inputs.insert(InputKind::Chat);
        can.media = [MediaKind::Image].into();
        Ok(EngineConfig::new("seeing", CONTEXT).with_capabilities(can))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let said = match &request.input {
            Input::Chat(chat) => {
                let media = chat.media()?;
                let said = media.iter().map(|(place, medium)| {
                    let bytes = medium.decode().unwrap();
                    format!("{place} {} {};", medium.format().name(), bytes.len())
                });
                let said: String = said.collect();
                let tokens = A_MEDIUM * u32::try_from(media.len()).unwrap();
                ctx.tell_prompt_tokens(tokens);
                said
            }
            Input::Tokens(_) | Input::Text(_) | Input::Embed(_) | Input::Score(_) => {
                "tokens".into()
            }
        };
        Ok(output::stream(ctx, move |out| async move {
            for token in encode(&said) {
                out.token(token).await?;
            }
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}})
}

fn audio() -> Value {
    json!({"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}})
}

fn asked(parts: Value) -> Value {
    let system = json!({"role": "system", "content": "Be brief."});
    json!({"model": MODEL, "messages": [system, {"role": "user", "content": parts}], "max_tokens": 200})
}

#[tokio::test]
async fn an_engine_that_sees_gets_the_messages_and_counts_the_prompt() {
    let site = Site::start(Arc::new(Seeing)).await;
    let text = json!({"type": "text", "text": "What is it?"});
    let body = asked(json!([text, image(GIF), image(GIF)]));
    let [whole, streamed] = site.whole_and_streamed(CHAT, body).await;
    let whole = whole.json();
    let said = "messages[1].content[1] gif 14;messages[1].content[2] gif 14;";
    assert_eq!(whole["choices"][0]["message"]["content"], said);
    assert_eq!(whole["usage"]["prompt_tokens"], 2 * A_MEDIUM);
    assert!(streamed.text().contains("[DONE]"), "{}", streamed.text());
    // If a stop string cuts the answer, the engine still reports the prompt's tokens.
    let mut cut = asked(json!([image(GIF), image(GIF)]));
    cut["stop"] = json!(" gif");
    let whole = site.post(CHAT, &cut).await.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["usage"]["prompt_tokens"], 2 * A_MEDIUM);
    cut["stream"] = true.into();
    cut["stream_options"] = json!({"include_usage": true});
    let streamed = site.post(CHAT, &cut).await;
    let said = format!("\"prompt_tokens\":{}", 2 * A_MEDIUM);
    assert!(streamed.text().contains(&said), "{}", streamed.text());
    // A chat without media is sent as tokens, through the model's own template.
    let plain = site.post(CHAT, &asked(json!([text]))).await.json();
    assert_eq!(plain["choices"][0]["message"]["content"], "tokens");
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn what_a_model_does_not_take_is_refused_by_its_place() {
    let text = json!({"type": "text", "text": "What is it?"});
    for (engine, parts, kind) in [
        (echo(), json!([image(GIF)]), MediaKind::Image),
        (echo_text(), json!([audio()]), MediaKind::Audio),
        (
            Arc::new(Seeing) as Arc<dyn LLMEngine>,
            json!([audio(), text]),
            MediaKind::Audio,
        ),
    ] {
        let site = Site::start(engine).await;
        let refused = site.post(CHAT, &asked(parts)).await;
        let message = refused.does_not_support("messages[1].content[0]");
        assert!(message.contains(&no_media(MODEL, kind)), "{message}");
        site.is_well().await;
        site.close().await;
    }
}

#[tokio::test]
async fn media_that_are_not_what_they_say_are_refused_by_name() {
    let max_bytes = 20;
    let media = MediaConfig {
        max_bytes,
        ..MediaConfig::default()
    };
    let config = FrontendConfig { media, ..config() };
    let site = Site::with(config, Arc::new(Seeing)).await;
    let png = GIF.replace("gif", "png");
    let cases = [
        (
            json!([image("data:image/gif;base64,R0lGODlhAQABAAAAACw")]),
            "messages[1].content[0]",
            "not base64",
        ),
        (
            json!([image(&png)]),
            "messages[1].content[0]",
            "its content is gif",
        ),
        (
            json!([image("data:image/svg+xml;base64,PHN2Zz4=")]),
            "messages[1].content[0]",
            "no known format",
        ),
        (
            json!([image(GIF), image(GIF)]),
            "messages[1].content[1]",
            "--media-max-bytes",
        ),
        (
            json!([{"type": "image_url"}]),
            "messages[1].content[0]",
            "expected {",
        ),
        (
            json!([{"type": "file", "file": {}}]),
            "messages[1].content[0].type",
            "file",
        ),
        (
            json!([{"type": "image_url", "image_url": {"url": GIF, "detail": "most"}}]),
            "messages[1].content[0].image_url.detail",
            "most",
        ),
        (
            json!([image("https://example.org/cat.png")]),
            "messages[1].content[0]",
            "--media-hosts",
        ),
    ];
    for (parts, param, problem) in cases {
        let message = site.post(CHAT, &asked(parts)).await.blames(param);
        assert!(message.contains(problem), "{message}");
    }
    let counted = json!({"model": MODEL, "messages": asked(json!([image(GIF)]))["messages"]});
    let refused = site.post("/tokenize", &counted).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(
        refused.text().contains("only the engine"),
        "{}",
        refused.text()
    );
    site.idle().await;
    site.close().await;
}

/// A remote worker: its card says what it supports, and the bytes cross the wire.
#[tokio::test]
async fn media_go_through_the_wire_to_a_worker_that_takes_them() {
    let discovery = MemoryDiscovery::new();
    let on_tcp = || {
        let metrics = MetricsRegistry::default();
        let plane = WirePlane::tcp(TcpConfig::default(), WireConfig::default(), &metrics);
        Runtime::new(Arc::new(discovery.clone()), Arc::new(plane.unwrap()))
    };
    let (there, here) = (on_tcp(), on_tcp());
    let metrics = there.metrics().clone();
    let worker = start_worker(&there, 1, Arc::new(Seeing), worker_config(), metrics).await;
    let server = FrontendServer::bind(&here, config()).await.unwrap();
    soon(server.models().any()).await.unwrap();
    let ask_for = async |body: Value| {
        let mut client = Client::connect(server.address()).await;
        client.send(post(CHAT, body.to_string())).await;
        client.response().await
    };
    let ask = async |parts: Value| ask_for(asked(parts)).await;
    // Megabytes, as in a photo.
    let mut bytes = b"GIF89a".to_vec();
    bytes.resize(6 << 20, 7);
    let large = format!("data:image/gif;base64,{}", STANDARD.encode(&bytes));
    let answer = ask(json!([image(&large)])).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let said = format!("messages[1].content[0] gif {};", bytes.len());
    assert_eq!(answer.json()["choices"][0]["message"]["content"], said);
    assert_eq!(answer.json()["usage"]["prompt_tokens"], A_MEDIUM);
    let mut cut = asked(json!([image(GIF)]));
    cut["stop"] = json!(" gif");
    let cut = ask_for(cut).await.json();
    assert_eq!(
        cut["choices"][0]["message"]["content"],
        "messages[1].content[0]"
    );
    assert_eq!(cut["usage"]["prompt_tokens"], A_MEDIUM);
    let refused = ask(json!([audio()])).await;
    assert_eq!(refused.json()["error"]["param"], "messages[1].content[0]");
    soon(server.shutdown(Duration::from_secs(30))).await;
    soon(worker.shutdown()).await;
    soon(here.shutdown()).await;
    soon(there.shutdown()).await;
}

/// The other APIs have their own names for it, and errors use these.
#[tokio::test]
async fn other_apis_show_images_in_their_own_words() {
    let site = Site::start(Arc::new(Seeing)).await;
    let base64 = GIF.split_once(',').unwrap().1;
    let block = |media_type: &str| {
        let source = json!({"type": "base64", "media_type": media_type, "data": base64});
        json!({"type": "image", "source": source})
    };
    let ask = |block: Value| {
        let said = json!([{"type": "text", "text": "One."}, block, {"type": "text", "text": "What is it?"}]);
        json!({"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": said}]})
    };
    let answer = site.post("/v1/messages", &ask(block("image/gif"))).await;
    let said = "messages[0].content[1] gif 14;";
    assert_eq!(
        answer.json()["content"][0]["text"],
        said,
        "{}",
        answer.text()
    );
    assert_eq!(answer.json()["usage"]["input_tokens"], A_MEDIUM);
    let wrong = site.post("/v1/messages", &ask(block("image/png"))).await;
    assert!(
        wrong.text().contains("messages[0].content[1].source"),
        "{}",
        wrong.text()
    );

    let input = |parts: Value| {
        let items = json!([{"role": "user", "content": "Hi."}, {"role": "user", "content": parts}]);
        json!({"model": MODEL, "max_output_tokens": 100, "input": items})
    };
    let text = json!({"type": "input_text", "text": "What is it?"});
    let marked = json!({"mode": "explicit"});
    let shown = json!({"type": "input_image", "image_url": GIF, "prompt_cache_breakpoint": marked});
    let sound = json!({"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}});
    let answer = site
        .post("/v1/responses", &input(json!([text, shown])))
        .await;
    let first = answer.json();
    assert_eq!(
        first["output"][0]["content"][0]["text"],
        said,
        "{}",
        answer.text()
    );
    assert_eq!(first["usage"]["input_tokens"], A_MEDIUM);
    // The next turn contains the earlier media.
    let mut next = input(json!([text]));
    next["previous_response_id"] = first["id"].clone();
    let answer = site.post("/v1/responses", &next).await;
    let said = answer.json()["output"][0]["content"][0]["text"].clone();
    assert_eq!(said, "messages[0].content[1] gif 14;", "{}", answer.text());
    let refused = site
        .post("/v1/responses", &input(json!([text, sound])))
        .await;
    refused.blames("input[1].content[1]");
    site.idle().await;
    site.close().await;
}

/// Templates show no images in results.
#[tokio::test]
async fn images_of_results_follow_the_last_result() {
    let site = Site::start(Arc::new(Seeing)).await;
    let said = "messages[4].content[0] gif 14;";
    let base64 = GIF.split_once(',').unwrap().1;
    let source = json!({"type": "base64", "media_type": "image/gif", "data": base64});
    let found = json!([{"type": "text", "text": "Here."}, {"type": "image", "source": source}]);
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "look", "input": {}});
    let result = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
    let results = [result("a", found), result("b", json!("Nothing."))];
    let body = json!({"model": MODEL, "max_tokens": 100, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call("a"), call("b")]},
        {"role": "user", "content": results},
    ]});
    let answer = site.post("/v1/messages", &body).await;
    assert_eq!(
        answer.json()["content"][0]["text"],
        said,
        "{}",
        answer.text()
    );

    let found = json!([{"type": "input_text", "text": "Here."}, {"type": "input_image", "image_url": GIF, "detail": "auto"}]);
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"});
    let output = |id: &str, output: &Value| json!({"type": "function_call_output", "call_id": id, "output": output});
    let items = json!([
        {"role": "user", "content": "Look."}, call("a"), call("b"), output("a", &found), output("b", &json!("Nothing.")),
    ]);
    let body = json!({"model": MODEL, "max_output_tokens": 100, "input": items});
    let answer = site.post("/v1/responses", &body).await.json();
    assert_eq!(answer["output"][0]["content"][0]["text"], said, "{answer}");
    let id = answer["id"].as_str().expect("an id");
    let path = format!("/v1/responses/{id}/input_items?order=asc");
    let items = site.get(&path).await.json();
    assert_eq!(items["data"][3]["output"], found, "{items}");
    site.idle().await;
    site.close().await;
}

/// The engine renders such a chat, by the model's template.
#[tokio::test]
async fn instructions_lead_where_the_template_refuses_them_beside_images() {
    let template = "{% for m in messages %}{{ m.content }}\
        {% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}";
    let worker = with_template(worker_config(), template);
    let site = Site::with_worker(config(), worker, Arc::new(Seeing)).await;
    let mut body = asked(json!([image(GIF)]));
    let further = json!({"role": "system", "content": "Be kind."});
    body["messages"].as_array_mut().unwrap().insert(1, further);
    let answer = site.post(CHAT, &body).await.json();
    let said = "messages[1].content[0] gif 14;";
    assert_eq!(answer["choices"][0]["message"]["content"], said, "{answer}");
    site.close().await;
}
