//! Reads and writes of a connection that wraps another one.

/// Implements `tokio::io::AsyncRead` for a connection by that of its parts.
///
/// Takes the generic parameters in brackets, the type, and for each form of the connection a
/// pattern and the part in it: `forward_read!([] Wrapper, Self { stream, .. } => stream)`. The
/// connection and its parts must be `Unpin`.
#[macro_export]
macro_rules! forward_read {
    ([$($generics:tt)*] $connection:ty, $($form:pat => $part:expr),+ $(,)?) => {
        impl<$($generics)*> ::tokio::io::AsyncRead for $connection {
            fn poll_read(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                buffer: &mut ::tokio::io::ReadBuf<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($form => ::tokio::io::AsyncRead::poll_read(
                        ::std::pin::Pin::new($part),
                        context,
                        buffer,
                    ),)+
                }
            }
        }
    };
}

/// Implements `tokio::io::AsyncWrite` for a connection by that of its parts.
///
/// Has the arguments of [`forward_read!`](crate::forward_read!).
#[macro_export]
macro_rules! forward_write {
    ([$($generics:tt)*] $connection:ty, $($form:pat => $part:expr),+ $(,)?) => {
        impl<$($generics)*> ::tokio::io::AsyncWrite for $connection {
            fn poll_write(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                bytes: &[u8],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                match self.get_mut() {
                    $($form => ::tokio::io::AsyncWrite::poll_write(
                        ::std::pin::Pin::new($part),
                        context,
                        bytes,
                    ),)+
                }
            }

            fn poll_write_vectored(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                buffers: &[::std::io::IoSlice<'_>],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                match self.get_mut() {
                    $($form => ::tokio::io::AsyncWrite::poll_write_vectored(
                        ::std::pin::Pin::new($part),
                        context,
                        buffers,
                    ),)+
                }
            }

            fn is_write_vectored(&self) -> bool {
                match self {
                    $($form => ::tokio::io::AsyncWrite::is_write_vectored($part),)+
                }
            }

            fn poll_flush(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($form => ::tokio::io::AsyncWrite::poll_flush(
                        ::std::pin::Pin::new($part),
                        context,
                    ),)+
                }
            }

            fn poll_shutdown(
                self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($form => ::tokio::io::AsyncWrite::poll_shutdown(
                        ::std::pin::Pin::new($part),
                        context,
                    ),)+
                }
            }
        }
    };
}
