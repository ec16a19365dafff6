//! Keys and values of single messages, built in advance, so that a run measures sending.
//!
//! Seeded: the same flags give the same bytes.

use std::fs::OpenOptions;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Most bytes of all values of a pool.
pub(crate) const POOL_BYTES_MAX: usize = 256 << 20;
/// Most bytes of a value.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Most bytes of a file with values.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Distinct keys.
const KEYS: usize = 10_000;
/// Distance between the first values of two producers.
const PRODUCER_STEP: usize = 37;

/// Values that are sent in turn.
#[derive(Debug, Clone)]
pub(crate) struct MessagePool(Arc<[Bytes]>);

impl MessagePool {
    /// Returns `count` values of `size` bytes: a share of random bytes, and zeroes after them.
    ///
    /// # Errors
    /// There would be no value, or more than [`POOL_BYTES_MAX`] bytes.
    pub(crate) fn random(size: usize, random_ratio: f64, count: usize, seed: u64) -> Result<Self> {
        ensure!(count > 0, "at least one value is needed");
        let bytes = size.saturating_mul(count);
        ensure!(
            bytes <= POOL_BYTES_MAX,
            "{count} values of {size} bytes take {bytes} bytes; the limit is {POOL_BYTES_MAX}"
        );
        let mut rng = StdRng::seed_from_u64(seed);
        let random = ((size as f64 * random_ratio.clamp(0.0, 1.0)) as usize).min(size);
        let value = |_| {
            let mut value = vec![0; size];
            rng.fill(&mut value[..random]);
            Bytes::from(value)
        };
        Ok(Self((0..count).map(value).collect()))
    }

    /// Returns the contents of a file as the only value.
    ///
    /// # Errors
    /// The file cannot be read, or has another size.
    pub(crate) fn of_file(path: &Path, size: usize) -> Result<Self> {
        let value = read_file(path)?;
        ensure!(
            value.len() == size,
            "{} has {} bytes and messageSize is {size}; they must be equal",
            path.display(),
            value.len()
        );
        Ok(Self([value].into()))
    }

    /// Returns the parts of a file between delimiters as values. Empty parts are left out.
    ///
    /// # Errors
    /// The file cannot be read or has no values.
    pub(crate) fn of_parts(path: &Path, delimiter: &str) -> Result<Self> {
        ensure!(!delimiter.is_empty(), "the delimiter is empty");
        let file = read_file(path)?;
        let text = std::str::from_utf8(&file);
        let text = text.with_context(|| format!("{} is not text", path.display()))?;
        let parts = text.split(delimiter).filter(|part| !part.is_empty());
        let values: Vec<Bytes> = parts.map(|part| file.slice_ref(part.as_bytes())).collect();
        ensure!(!values.is_empty(), "{} has no values", path.display());
        Ok(Self(values.into()))
    }

    /// Returns the mean size of a value, rounded.
    pub(crate) fn mean_bytes(&self) -> usize {
        let bytes: usize = self.0.iter().map(Bytes::len).sum();
        (bytes + self.0.len() / 2) / self.0.len().max(1)
    }

    /// Returns the messages of a producer, which starts at another value than its neighbours.
    pub(crate) fn producer(
        &self,
        number: usize,
        keys: KeyDistribution,
        seed: u64,
    ) -> MessageSource {
        MessageSource {
            values: self.0.clone(),
            next_value: number.wrapping_mul(PRODUCER_STEP) % self.0.len(),
            keys,
            next_key: number.wrapping_mul(PRODUCER_STEP) % KEYS,
            rng: StdRng::seed_from_u64(seed ^ (number as u64).rotate_left(32)),
        }
    }
}

fn read_file(path: &Path) -> Result<Bytes> {
    let name = path.display();
    let file = OpenOptions::new().read(true).open(path);
    let file = file.with_context(|| format!("open {name}"))?;
    let mut contents = Vec::new();
    // One byte more shows that the file is too large.
    let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut contents);
    read.with_context(|| format!("read {name}"))?;
    ensure!(
        contents.len() as u64 <= FILE_BYTES_MAX,
        "{name} has more than {FILE_BYTES_MAX} bytes, the limit of a payload file"
    );
    Ok(contents.into())
}

/// Keys of the messages of a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyDistribution {
    NoKey,
    /// 10,000 keys in turn.
    RoundRobin,
    /// One of 10,000 keys at random.
    Random,
}

/// Messages of one producer.
#[derive(Debug)]
pub(crate) struct MessageSource {
    values: Arc<[Bytes]>,
    next_value: usize,
    keys: KeyDistribution,
    next_key: usize,
    rng: StdRng,
}

impl MessageSource {
    /// Returns the key and the value of the next message.
    pub(crate) fn next(&mut self) -> (Option<Bytes>, Bytes) {
        let value = self.values[self.next_value].clone();
        self.next_value = (self.next_value + 1) % self.values.len();
        let key = match self.keys {
            KeyDistribution::NoKey => None,
            KeyDistribution::RoundRobin => {
                let number = self.next_key;
                self.next_key = (number + 1) % KEYS;
                Some(number)
            }
            KeyDistribution::Random => Some(self.rng.random_range(0..KEYS)),
        };
        (key.map(|number| Bytes::from(format!("key-{number:04}"))), value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn random_share_of_a_value_comes_first() {
        let pool = MessagePool::random(100, 0.3, 4, 1).unwrap();
        let mut source = pool.producer(0, KeyDistribution::NoKey, 1);
        let values: Vec<Bytes> = (0..5).map(|_| source.next().1).collect();
        assert!(values.iter().all(|value| value.len() == 100 && value[30..] == [0; 70]));
        assert_ne!(values[0][..30], values[1][..30]);
        assert_eq!(values[0], values[4], "four values in turn");
        let again = MessagePool::random(100, 0.3, 4, 1).unwrap();
        assert_eq!(again.producer(0, KeyDistribution::NoKey, 1).next().1, values[0]);
    }

    #[test]
    fn pool_is_bounded_before_it_is_built() {
        assert!(MessagePool::random(1 << 20, 1.0, 257, 1).is_err());
        assert!(MessagePool::random(usize::MAX, 1.0, usize::MAX, 1).is_err());
        assert!(MessagePool::random(1, 1.0, 0, 1).is_err());
    }

    #[test]
    fn keys_follow_their_distribution() {
        let pool = MessagePool::random(1, 0.0, 1, 1).unwrap();
        let keys = |keys: KeyDistribution, count: usize| {
            let mut source = pool.producer(3, keys, 1);
            let keys = (0..count).filter_map(move |_| source.next().0);
            keys.collect::<BTreeSet<_>>().len()
        };
        assert_eq!(keys(KeyDistribution::NoKey, 100), 0);
        assert_eq!(keys(KeyDistribution::RoundRobin, KEYS), KEYS);
        let random = keys(KeyDistribution::Random, KEYS);
        assert!((KEYS / 2..KEYS).contains(&random), "{random}");
    }

    #[test]
    fn file_is_one_value_or_its_parts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("payload");
        crate::figures::write_file(&path, b"one\n\ntwo\n").unwrap();
        let whole = MessagePool::of_file(&path, 9).unwrap();
        assert_eq!(&whole.producer(0, KeyDistribution::NoKey, 1).next().1[..], b"one\n\ntwo\n");
        let error = MessagePool::of_file(&path, 10).unwrap_err().to_string();
        assert!(error.contains("has 9 bytes and messageSize is 10"), "{error}");
        let parts = MessagePool::of_parts(&path, "\n").unwrap();
        assert_eq!(parts.mean_bytes(), 3);
        let mut parts = parts.producer(0, KeyDistribution::NoKey, 1);
        assert_eq!([parts.next().1, parts.next().1, parts.next().1], ["one", "two", "one"]);
        assert!(MessagePool::of_parts(&path, "").is_err());
        assert!(MessagePool::of_file(&dir.path().join("none"), 1).is_err());
    }
}
