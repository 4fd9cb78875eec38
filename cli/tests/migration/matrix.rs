//! Every engine with every request that it can answer, streamed and in one piece: cut after each of its tokens, twice and three
//! times. Of two types of weights, only the numbers differ: for the second, those requests whose answers show them.

use crate::engines::{self, Fleet};
use crate::requests::{self, Request};
use crate::site::{Answer, Site};

/// The stop string of an answer: this many characters on either side of its middle, more than one token.
const STOP_CHARS: usize = 5;

/// Compares the answers to `requests` that were cut with undisturbed ones.
async fn check(fleet: Fleet, requests: Vec<Request>) {
    let site = Site::start(fleet).await;
    for mut request in requests {
        if request.is_stopped {
            stop(&site, &mut request).await;
        }
        let whole = site.ask(&request, &[]).await;
        assert!(
            whole.lines[0].contains(request.shows),
            "{request:?}: {whole:?}"
        );
        let streamed = request.streamed();
        let streamed = Case::begin(&site, &streamed).await;
        let last = streamed.is_exact_everywhere().await;
        streamed.is_exact(last).await;
        Case::begin(&site, &request).await.is_exact(last).await;
    }
    site.close().await;
}

/// Adds a stop string to a request, which ends its answer in the middle.
async fn stop(site: &Site, request: &mut Request) {
    let api = request.api;
    let whole = site.ask(request, &[]).await;
    let text = api.text(&whole.lines[0]);
    let middle = text.chars().count() / 2;
    let stop = text.chars().skip(middle.saturating_sub(STOP_CHARS));
    let stop: String = stop.take(2 * STOP_CHARS).collect();
    let (before, _) = text.split_once(&stop).unwrap();
    request.body[api.stop()] = vec![stop.clone()].into();
    let stopped = site.ask(request, &[]).await;
    assert_eq!(api.text(&stopped.lines[0]), before, "{request:?}");
}

/// A request, and its undisturbed answer.
struct Case<'a> {
    site: &'a Site,
    request: &'a Request,
    whole: Answer,
}

impl<'a> Case<'a> {
    async fn begin(site: &'a Site, request: &'a Request) -> Self {
        let whole = site.ask(request, &[]).await;
        assert_eq!(whole.moves, 0);
        Self {
            site,
            request,
            whole,
        }
    }

    /// Cuts the answer after each token. Returns the number of tokens of its longest choice.
    async fn is_exact_everywhere(&self) -> u32 {
        let mut last = 1;
        while self.cut(&[last]).await > 0 {
            last += 1;
        }
        let tokens = self.whole.tokens();
        let all = last * self.request.choices() * self.request.parts;
        assert!(last > 3 && all >= tokens, "{:?}", self.request);
        last.min(tokens)
    }

    /// Cuts the answer after its first token, in the middle and before its `last`; also in two and three of these places.
    async fn is_exact(&self, last: u32) {
        let (first, middle, last) = (1, last / 2, last - 1);
        let once = [&[first][..], &[middle], &[last]];
        let more = [
            &[first, middle][..],
            &[middle, last],
            &[first, middle, last],
        ];
        for cuts in once.into_iter().chain(more) {
            let moves = self.cut(cuts).await;
            assert!(
                moves >= cuts.len(),
                "{:?} cut at {cuts:?} moved {moves} times",
                self.request
            );
        }
    }

    /// Returns how often an answer that breaks at `cuts` migrates.
    async fn cut(&self, cuts: &[u32]) -> usize {
        let answer = self.site.ask(self.request, cuts).await;
        assert_eq!(
            answer.lines, self.whole.lines,
            "{:?} cut at {cuts:?}",
            self.request
        );
        answer.moves
    }
}

/// One test for each pair of an engine and a request.
macro_rules! matrix {
    ($($engine:ident: $($requests:ident),+;)+) => {$(
        mod $engine {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $requests() {
                    super::check(super::engines::$engine(), super::requests::$requests()).await;
                }
            )+
        }
    )+};
}

matrix! {
    gguf: tokens, sampling, logprobs, guides;
    safetensors: tokens, logprobs;
    sample: tokens;
    mocker: tokens;
    python: tokens;
    python_batching: tokens;
    recital: markup, formats;
}
