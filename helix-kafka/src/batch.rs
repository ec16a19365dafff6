//! Record batches: the check of those that clients send, and the conversion of native ones.

mod convert;
mod produced;

pub use convert::{ConvertedBatches, kafka_batch_of, place_batch};
pub use produced::{ProducedBatch, check_produced};
