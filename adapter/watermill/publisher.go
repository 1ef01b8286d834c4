package weirwatermill

import (
	"context"
	"errors"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// PublisherConfig are the options of a Publisher or TxPublisher. The zero value is ready to use. Its functions may be called by
// several goroutines at once.
type PublisherConfig struct {
	// MessageKey gives the key of a message: what it is about, and what order is kept by. "" for none, at most 1,024 bytes, valid
	// UTF-8 without NUL. Default: no message has one.
	MessageKey func(topic string, m *message.Message) string
	// Complete is called with what is about to be stored, its key, headers and payload set, and may set the rest of it:
	// IdempotencyKey, DeliverAt, Delay, Priority, Timeout. Default: nothing more is set.
	Complete func(topic string, m *message.Message, out *weir.Message)
	// AutoCreate creates a topic that is missing when something is published to it. Default false: weir.ErrTopicNotFound. A
	// TxPublisher has none: a topic is created in a transaction of its own.
	AutoCreate bool
	// TopicOptions are those of a topic that is created. Default format weir.Bytes.
	TopicOptions weir.TopicOptions
}

// Publisher stores messages in topics. It is safe for concurrent use by any number of goroutines.
type Publisher struct {
	client *weir.Client
	config PublisherConfig

	// mu is held shared while messages are stored, so that Close waits for that.
	mu     sync.RWMutex
	closed bool
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher makes a Publisher on a client, which it does not close. It does not contact the server. Errors: weir.ErrInvalid.
func NewPublisher(client *weir.Client, config *PublisherConfig) (*Publisher, error) {
	if client == nil {
		return nil, invalid("client", nil, "it must be an open client")
	}
	if config == nil {
		config = &PublisherConfig{}
	}
	return &Publisher{client: client, config: *config}, nil
}

// Publish stores the messages in one transaction, all of them or none, in their order. When it has returned they are as durable as the
// server's commits are, and subscribers are woken. A lost connection or a restart of the server is got over, as Client.Produce
// does it. It ends when the context of one of the messages does.
//
// Errors: ErrClosed and those of Client.Produce: weir.ErrTopicNotFound; weir.ErrFormat and weir.ErrInvalid, which name the message by
// its place, from 0; weir.ErrUnknownOutcome: the messages may be stored. With AutoCreate those of Client.CreateTopic, too.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.closed {
		return ErrClosed
	}
	if len(messages) == 0 {
		return nil
	}
	out, err := p.config.toWeir(topic, messages)
	if err != nil {
		return err
	}
	ctx, cancel := together(messages)
	defer cancel()
	_, err = p.client.Produce(ctx, topic, out...)
	if p.config.AutoCreate && errors.Is(err, weir.ErrTopicNotFound) {
		if err := p.client.CreateTopic(ctx, topic, topicOptions(p.config.TopicOptions)); err != nil {
			return err
		}
		_, err = p.client.Produce(ctx, topic, out...)
	}
	return err
}

// Close waits for what is being stored and has Publish return ErrClosed from then on. It leaves the client open. It returns nil.
func (p *Publisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return nil
}

// TxPublisher stores messages in a transaction of the caller's: they exist once it commits, and never if it does not. It is safe for
// concurrent use as long as nobody else uses the transaction meanwhile.
type TxPublisher struct {
	client  *weir.Client
	config  PublisherConfig
	produce func(ctx context.Context, topic string, messages []weir.Message) error

	mu     sync.Mutex
	closed bool
	// topics that something was published to
	topics map[string]bool
}

var _ message.Publisher = (*TxPublisher)(nil)

// NewTxPublisher makes a publisher on a transaction of pgx, in the database of the client. It is for that one transaction. Errors:
// weir.ErrInvalid, also for AutoCreate.
func NewTxPublisher(client *weir.Client, tx pgx.Tx, config *PublisherConfig) (*TxPublisher, error) {
	return newTx(client, tx == nil, config, func(ctx context.Context, topic string, messages []weir.Message) error {
		_, err := client.ProduceTx(ctx, tx, topic, messages...)
		return err
	})
}

// NewSQLTxPublisher is NewTxPublisher for a transaction of database/sql.
func NewSQLTxPublisher(client *weir.Client, tx weir.SQLTx, config *PublisherConfig) (*TxPublisher, error) {
	return newTx(client, tx == nil, config, func(ctx context.Context, topic string, messages []weir.Message) error {
		_, err := client.ProduceSQL(ctx, tx, topic, messages...)
		return err
	})
}

func newTx(
	client *weir.Client, missing bool, config *PublisherConfig, produce func(context.Context, string, []weir.Message) error,
) (*TxPublisher, error) {
	if config == nil {
		config = &PublisherConfig{}
	}
	switch {
	case client == nil:
		return nil, invalid("client", nil, "it must be an open client")
	case missing:
		return nil, invalid("tx", nil, "it must be a transaction")
	case config.AutoCreate:
		return nil, invalid("AutoCreate", true, "create the topic before the transaction, with Client.CreateTopic")
	}
	return &TxPublisher{client: client, config: *config, produce: produce, topics: map[string]bool{}}, nil
}

// Publish stores the messages in the transaction, in their order. Subscribers find them once it has committed: at once with Wake, and
// else when they look next, after weir.ConsumerOptions.PollInterval at the latest. It ends when the context of one of the messages
// does, which can cost the transaction its connection.
//
// Errors are those of Publisher.Publish. What the server refuses ends the transaction: roll it back. It does not try again.
func (p *TxPublisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	if len(messages) == 0 {
		return nil
	}
	out, err := p.config.toWeir(topic, messages)
	if err != nil {
		return err
	}
	ctx, cancel := together(messages)
	defer cancel()
	if err := p.produce(ctx, topic, out); err != nil {
		return err
	}
	p.topics[topic] = true
	return nil
}

// Wake has subscribers look at once for what was published. Call it after the commit; it may be left out.
func (p *TxPublisher) Wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for topic := range p.topics {
		p.client.Wake(topic)
	}
}

// Close has Publish return ErrClosed from then on. It leaves transaction and client as they are. It returns nil.
func (p *TxPublisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return nil
}
