//! A ledger that concurrent writers cannot overdraw: `docs/recipes.md`.
//! `cargo run -p helix-client --example ledger -- 127.0.0.1:9092 accounts 25`

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{
    AppendOptions, Client, Config, FetchOptions, Position, Producer, ProducerOptions, ReadStart,
    Result,
};

// doc: ledger
/// A balance that is the sum of all records below `next_offset`.
///
/// An entry based on this balance is appended at `next_offset` or not at all.
pub struct Ledger {
    client: Client,
    producer: Producer,
    topic: String,
    next_offset: u64,
    balance: i64,
}

impl Ledger {
    pub fn new(client: &Client, topic: &str) -> Self {
        Self {
            client: client.clone(),
            producer: client.producer(ProducerOptions::default()),
            topic: topic.to_owned(),
            next_offset: 0,
            balance: 0,
        }
    }

    /// Books an amount. Returns the new balance, or `None` if it would fall below zero.
    pub async fn book(&mut self, amount: i64) -> Result<Option<i64>> {
        loop {
            self.catch_up().await?;
            let balance = self.balance + amount;
            if balance < 0 {
                return Ok(None);
            }
            let entry = Record { value: Some(amount.to_string().into()), ..Record::default() };
            let here = AppendOptions::default().expecting(self.next_offset);
            match self.producer.append_with(&self.topic, 0, &[entry][..], &here).await {
                Ok(_) => return Ok(Some(balance)),
                // Another writer was faster and has changed the balance.
                Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads the entries booked since, by this and other ledgers.
    async fn catch_up(&mut self) -> Result<()> {
        loop {
            let start = ReadStart::new(&self.topic, 0, Position::Offset(self.next_offset));
            let read = self.client.consumer().fetch(&[start], &FetchOptions::default()).await?;
            for entry in &read[0].records {
                let text = entry.value.as_deref().unwrap_or_default();
                let amount = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                self.balance += amount.unwrap_or(0);
            }
            self.next_offset = read[0].next_offset;
            if read[0].records.is_empty() {
                return Ok(());
            }
        }
    }
}
// doc: end

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic), Some(amount)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: ledger ADDRESS TOPIC AMOUNT".into());
    };
    let client = Client::new(Config::new([address]))?;
    match Ledger::new(&client, &topic).book(amount.parse()?).await? {
        Some(balance) => println!("the balance is {balance}"),
        None => println!("not booked: the balance is too low"),
    }
    Ok(())
}
