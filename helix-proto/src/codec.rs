//! The protobuf codec of every generated client and server.
//!
//! Unlike tonic's own codec it reserves the buffer of a whole message at once.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Initial buffer size of each direction of a call, in bytes.
///
/// Small, because the encoder reserves what it needs and the decoder knows the message's length.
const BUFFER_BYTES: usize = 1024;

/// Encoded bytes at which a stream stops collecting ready messages and sends them.
const YIELD_BYTES: usize = 64 * 1024;

fn buffer_settings() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
}

/// Encodes `T` and decodes `U` as protobuf.
#[derive(Debug, Clone)]
pub struct Codec<T, U> {
    types: PhantomData<(T, U)>,
}

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self { types: PhantomData }
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = WholeEncoder<T>;
    type Decoder = WholeDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        WholeEncoder { message: PhantomData }
    }

    fn decoder(&mut self) -> Self::Decoder {
        WholeDecoder { message: PhantomData }
    }
}

/// Encoder that reserves space for the whole message before it writes.
#[derive(Debug)]
pub struct WholeEncoder<T> {
    message: PhantomData<T>,
}

impl<T: Message> Encoder for WholeEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // Growing by doubling would copy a batch of 100 KiB about twice.
        buffer.reserve(item.encoded_len());
        item.encode_raw(buffer);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer_settings()
    }
}

/// Decoder of one message; `bytes` fields are slices of the buffer it arrived in.
#[derive(Debug)]
pub struct WholeDecoder<U> {
    message: PhantomData<U>,
}

impl<U: Message + Default> Decoder for WholeDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // INTERNAL is what the gRPC specification assigns to an unreadable message.
        U::decode(buffer).map(Some).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer_settings()
    }
}
