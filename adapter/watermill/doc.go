// Package weirwatermill is a Watermill Pub/Sub on Weir: a message.Publisher that stores messages in a topic, in a transaction of
// the caller's if wanted, and a message.Subscriber that is a consumer of a group.
//
//	client, err := weir.Open(ctx, dsn, &weir.Options{Migrate: true})
//	publisher, err := weirwatermill.NewPublisher(client, &weirwatermill.PublisherConfig{AutoCreate: true})
//	subscriber, err := weirwatermill.NewSubscriber(client, "billing", nil)
//	messages, err := subscriber.Subscribe(ctx, "orders")
//
// # Messages
//
// The payload is stored byte for byte, the metadata as headers, the UUID as the header UUIDHeader. Metadata is to be valid UTF-8
// without NUL; a message that is not is refused with weir.ErrFormat. A message that was produced without that header, by SQL or by
// Client.Produce, has its id in decimal as its UUID. ReceivedFrom gives what else Weir knows of a message.
//
// # Topics
//
// A topic of Watermill is the topic of Weir of the same name: 1 to 200 characters, no control characters, no space at either end.
// Other names are refused: with weir.ErrInvalid where a topic would be created, and where they are not valid UTF-8 without NUL; else
// with weir.ErrTopicNotFound, since there is no such topic. Topics that are created here take any bytes (weir.Bytes); TopicOptions
// say otherwise. A topic that exists with another format can be published to, when the payloads fit it; to subscribe, its format
// must be given, or NoCreate.
//
// # Guarantees
//
// Delivery is at least once: a message can come twice, under the same UUID. In an ordered group, the default, messages with the
// same key come in the order of their ids and one at a time, across Nacks, subscribers and processes; those without a key
// (PublisherConfig.MessageKey) have no order among them. The other modes keep no order after a Nack.
package weirwatermill
