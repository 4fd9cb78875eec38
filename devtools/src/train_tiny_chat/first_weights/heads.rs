//! Heads that copy, and that choose what to copy.
//!
//! To copy, a head of layer 0 tells every token its predecessor; heads of the last layer look for tokens whose predecessor is
//! the current token, and write what they find. To choose, those heads also prefer positions near text that the user has
//! said. For that, another head of layer 0 tells every token who speaks, heads of layer 1 look for other occurrences of the
//! same token and tell whether the user said it, and a head of layer 2 sums that over the last tokens. So of the tools after
//! a question, the model names the one whose description shares words with the question.
//!
//! Scores are sums of products of normalized values, divided by the root of a head's width; the strengths below bring the
//! decisive scores to about 20.

use rand::Rng;

use super::{CONSTANT, Matrices, Matrix, Stream, normal};

/// Query heads per KV head.
const GROUP: usize = 2;
const KV_HEADS: usize = 2;

/// Rotary pairs that turn fast: they distinguish adjacent positions.
const FAST_PAIRS: usize = 8;
/// Pairs that turn slowly: their values are comparable over hundreds of tokens.
const SLOW_PAIRS: usize = 16;
/// Pairs that turn so slowly that a token 200 positions away compares like a near one.
const SLOWEST_PAIRS: usize = 10;
/// The pair whose sine of the distance rises over 280 tokens.
const RISING_PAIR: usize = 18;
/// Pairs whose cosines of the distance together fade over a dozen tokens.
const WINDOW_PAIRS: [usize; 3] = [8, 10, 12];

/// How strongly a head of layer 0 attends to the previous position.
const ONE_BACK: f32 = 0.35;
/// How strongly heads attend to the same token.
const SAME: f32 = 9.0;
/// How strongly heads attend to successors of the current token.
const NEXT: f32 = 14.0;
/// How strongly marks are preferred to all else.
const MARK: f32 = 2.0;
/// How strongly the nearer mark is preferred.
const NEARER: f32 = 26.0 / 16.0;
/// How strongly near tokens are preferred in the sum.
const WINDOW: f32 = 0.25;
/// How strongly positions that fit are preferred, in the query.
const FIT: f32 = 12.0 / 16.0;
/// The growth of the stream's norm from layer 0, which writes who speaks, to the end of layer 1.
const GROWN: f32 = 1.25;

/// What the heads write, in deviations of the embedding.
const BEFORE_WRITTEN: f32 = 1.5;
const FITS_WRITTEN: f32 = 3.0;
const COPY_WRITTEN: f32 = 8.0;

/// The initial weights while heads are written into them.
pub(super) struct Heads<'a> {
    pub(super) matrices: &'a mut Matrices,
    pub(super) stream: &'a Stream,
    /// The deviation of the embedding.
    pub(super) deviation: f32,
    pub(super) width: usize,
    pub(super) theta: f32,
}

/// A head in one of a layer's attention matrices.
#[derive(Clone, Copy)]
struct Place {
    layer: usize,
    part: &'static str,
    head: usize,
}

/// The same weight for each column.
fn each(columns: &[usize], weight: f32) -> impl Iterator<Item = (usize, f32)> {
    columns.iter().map(move |&column| (column, weight))
}

/// Mixtures of a token's content, for comparison.
struct Mixtures(Vec<Vec<f32>>);

impl Mixtures {
    fn random(stream: &Stream, rng: &mut impl Rng) -> Self {
        let deviation = (stream.content.len() as f32).sqrt().recip();
        let mixture = |_| {
            stream
                .content
                .iter()
                .map(|_| normal(rng) * deviation)
                .collect()
        };
        Self(stream.before.iter().map(mixture).collect())
    }

    /// A mixture as a row that reads the content.
    fn read<'a>(
        &'a self,
        at: usize,
        stream: &'a Stream,
        strength: f32,
    ) -> impl Iterator<Item = (usize, f32)> {
        let mixture = stream.content.iter().zip(&self.0[at]);
        mixture.map(move |(&column, value)| (column, strength * value))
    }
}

impl Heads<'_> {
    pub(super) fn put(mut self, rng: &mut impl Rng) {
        let mixtures = Mixtures::random(self.stream, rng);
        self.tell_the_token_before(&mixtures);
        self.tell_who_speaks();
        self.tell_what_the_user_said(&mixtures);
        self.sum_up();
        self.copy_what_fits(&mixtures);
    }

    /// Head 0 of layer 0: the query is the previous position's key, made of values that all tokens share.
    fn tell_the_token_before(&mut self, mixtures: &Mixtures) {
        let stream = self.stream;
        let half = self.width / 2;
        let [query, key, value] = places(0, 0, 0);
        for pair in 0..half {
            let turn = self.theta.powf(-(2.0 * pair as f32) / self.width as f32);
            let (sin, cos) = turn.sin_cos();
            let strength = if pair < FAST_PAIRS { ONE_BACK } else { 0.0 };
            self.reads(query, pair, each(&stream.constant, strength * cos));
            self.reads(query, pair + half, each(&stream.constant, strength * -sin));
            self.reads(key, pair, each(&stream.constant, strength));
            self.reads(key, pair + half, []);
        }
        for (row, &column) in stream.before.iter().enumerate() {
            self.reads(value, row, mixtures.read(row, stream, 1.0));
            self.writes(0, query.head, row, &[column], BEFORE_WRITTEN);
        }
    }

    /// Head 2 of layer 0: attends to the nearest mark of a message.
    fn tell_who_speaks(&mut self) {
        let stream = self.stream;
        let half = self.width / 2;
        let [query, key, value] = places(0, GROUP, 1);
        self.forget([query, key]);
        self.reads(query, half - 1, each(&stream.constant, MARK));
        self.reads(key, half - 1, each(&stream.mark, MARK));
        self.reads(query, RISING_PAIR + half, each(&stream.constant, NEARER));
        self.reads(key, RISING_PAIR, each(&stream.mark, NEARER));
        self.reads(value, 0, mean(&stream.user));
        self.writes(0, query.head, 0, &stream.user, 1.0);
    }

    /// The first head of each group in layer 1: attends to all occurrences of the same token, including the current one, and
    /// tells how many of them the user said.
    fn tell_what_the_user_said(&mut self, mixtures: &Mixtures) {
        let stream = self.stream;
        let half = self.width / 2;
        let last = self.width - 1;
        for kv_head in 0..KV_HEADS {
            let [query, key, value] = places(1, kv_head * GROUP, kv_head);
            self.forget([query, key]);
            for (at, row) in self.slow_rows(kv_head) {
                if row % half >= half - SLOWEST_PAIRS {
                    self.reads(key, row, mixtures.read(at, stream, 1.0));
                    self.reads(query, row, mixtures.read(at, stream, SAME));
                }
            }
            self.reads(value, last, mean(&stream.user));
            self.writes(1, query.head, last, &stream.said, 1.0);
        }
    }

    /// Head 0 of layer 2: tells how many of the last tokens the user said, except those in the user's own message here.
    fn sum_up(&mut self) {
        let stream = self.stream;
        let [query, key, value] = places(2, 0, 0);
        self.forget([query, key]);
        for pair in WINDOW_PAIRS {
            for place in [query, key] {
                self.reads(place, pair, each(&stream.constant, WINDOW));
            }
        }
        let here = mean(&stream.user).map(|(column, weight)| (column, -GROWN * weight));
        self.reads(value, 0, mean(&stream.said).chain(here));
        self.writes(2, query.head, 0, &stream.fits, FITS_WRITTEN);
    }

    /// The first head of each group in layer 3: attends to successors of the current token elsewhere, prefers those that fit,
    /// and writes them.
    fn copy_what_fits(&mut self, mixtures: &Mixtures) {
        let stream = self.stream;
        let slowest = self.width / 2 - 1;
        for kv_head in 0..KV_HEADS {
            let [query, key, value] = places(3, kv_head * GROUP, kv_head);
            self.forget([query, key]);
            for (at, row) in self.slow_rows(kv_head) {
                if row == slowest {
                    self.reads(query, row, each(&stream.constant, FIT));
                    self.reads(key, row, each(&stream.fits, CONSTANT * FIT));
                } else {
                    self.reads(query, row, mixtures.read(at, stream, NEXT));
                    self.reads(key, row, [(stream.before[at], 1.0)]);
                }
            }
            let own = &stream.content[kv_head * self.width..];
            for (row, &column) in own.iter().take(self.width).enumerate() {
                self.reads(value, row, [(column, 1.0)]);
                self.writes(3, query.head, row, &[column], COPY_WRITTEN);
            }
        }
    }

    /// The rows of a KV head's slow pairs, each with the index of the mixture that it compares.
    fn slow_rows(&self, kv_head: usize) -> Vec<(usize, usize)> {
        let half = self.width / 2;
        let slow = half - SLOW_PAIRS..half;
        let rows = slow.clone().chain(slow.map(|pair| pair + half));
        (kv_head * 2 * SLOW_PAIRS..).zip(rows).collect()
    }

    /// Makes a head's row read these values of the stream and no others.
    fn reads(&mut self, place: Place, row: usize, values: impl IntoIterator<Item = (usize, f32)>) {
        let row = place.head * self.width + row;
        let row = self.matrix(place.layer, place.part).row(row);
        row.fill(0.0);
        for (column, weight) in values {
            row[column] = weight;
        }
    }

    /// Makes the heads' rows read nothing.
    fn forget(&mut self, places: [Place; 2]) {
        for place in places {
            (0..self.width).for_each(|row| self.reads(place, row, []));
        }
    }

    /// Sets the columns to which a head's value row is written.
    fn writes(&mut self, layer: usize, head: usize, row: usize, columns: &[usize], strength: f32) {
        let (from, weight) = (head * self.width + row, strength * self.deviation);
        let matrix = self.matrix(layer, "o");
        columns
            .iter()
            .for_each(|&column| matrix.row(column)[from] = weight);
    }

    /// One of a layer's four attention matrices, which every configuration has.
    #[expect(
        clippy::expect_used,
        reason = "the configuration lists its own tensors"
    )]
    fn matrix(&mut self, layer: usize, part: &str) -> &mut Matrix {
        let name = format!("model.layers.{layer}.self_attn.{part}_proj.weight");
        let matrix = self.matrices.get_mut(&name).map(|(_, matrix)| matrix);
        matrix.expect("a matrix of attention")
    }
}

/// The places of a query head's queries, and of its KV head's keys and values.
fn places(layer: usize, query_head: usize, kv_head: usize) -> [Place; 3] {
    [("q", query_head), ("k", kv_head), ("v", kv_head)].map(|(part, head)| Place {
        layer,
        part,
        head,
    })
}

/// The mean of some columns.
fn mean(columns: &[usize]) -> impl Iterator<Item = (usize, f32)> {
    each(columns, (columns.len() as f32).recip())
}
