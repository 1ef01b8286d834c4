// Package weir is a durable message log with consumer groups that lives in an ordinary PostgreSQL database.
//
// A topic is a log of messages, numbered by their ids. Producers append to it, in the transaction of their business data
// if they like; groups read it independently, each from its own cursor, with retries and dead letters. Weir's promise is
// that no group ever skips a committed message, whatever the order in which transactions commit, and however long some of
// them take.
//
// The usual order of things:
//
//	client, err := weir.Open(ctx, dsn, &weir.Options{Migrate: true})  // or New, on a pgxpool.Pool
//	client.CreateTopic(ctx, "orders", nil)
//	client.CreateGroup(ctx, "orders", "billing", nil)
//	client.Produce(ctx, "orders", weir.Message{Key: "42", Payload: order})  // or ProduceTx, ProduceSQL, Copy
//	consumer, err := client.NewConsumer("orders", "billing", weir.Handle(bill), nil)
//	consumer.Run(ctx)
//
// Everything that happens in the database is a plain SQL function, which other languages call as well: see docs/sql.md. What
// is guaranteed, where it is enforced and which test attacks it stands in docs/guarantees.md.
package weir
