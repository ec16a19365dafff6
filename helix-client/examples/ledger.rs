//! A ledger that is never overdrawn, however many book at the same time: `docs/recipes.md`.
//! `cargo run -p helix-client --example ledger -- 127.0.0.1:9092 accounts 25`

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{
    AppendOptions, Client, Config, FetchOptions, Position, Producer, ProducerOptions, Result, Start,
};

// doc: ledger
/// The balance is the sum of the records. It is true up to `next_offset`, and an entry that was
/// decided by it is appended there or not at all.
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

    /// Books an amount and returns the new balance; None if it would fall below zero.
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
                // Somebody else was faster, and the balance is another one by now.
                Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads what was booked since, by this ledger and by others.
    async fn catch_up(&mut self) -> Result<()> {
        loop {
            let start = Start::new(&self.topic, 0, Position::Offset(self.next_offset));
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
        return Err("ADDRESS TOPIC AMOUNT".into());
    };
    let client = Client::new(Config::new([address]))?;
    match Ledger::new(&client, &topic).book(amount.parse()?).await? {
        Some(balance) => println!("the balance is {balance}"),
        None => println!("not booked: the balance is lower than that"),
    }
    Ok(())
}
