package weirwatermill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/weirhq/weir"
)

// UUIDHeader is the header that holds a message's UUID. Metadata must not have it: such a message is refused with weir.ErrInvalid.
const UUIDHeader = "_watermill_message_uuid"

// ErrClosed is returned by what was called on a closed Publisher, TxPublisher or Subscriber. Nothing was stored.
var ErrClosed = errors.New("closed")

type receivedKey struct{}

// ReceivedFrom returns what Weir knows of a message that a Subscriber gave out: its id, key, attempt, when it was stored, whether it is
// a tombstone. ctx is the message's context, or one made from it; false when it is neither. What is returned must not be changed.
func ReceivedFrom(ctx context.Context) (*weir.Received[[]byte], bool) {
	r, ok := ctx.Value(receivedKey{}).(*weir.Received[[]byte])
	return r, ok
}

// toWeir gives messages as they are stored.
func (c *PublisherConfig) toWeir(topic string, messages []*message.Message) ([]weir.Message, error) {
	if !utf8.ValidString(topic) || strings.ContainsRune(topic, 0) {
		return nil, fmt.Errorf("publish: %w", invalid("topic", fmt.Sprintf("%q", topic), "it must be valid UTF-8 without NUL"))
	}
	out := make([]weir.Message, len(messages))
	for i, m := range messages {
		headers := make(map[string]string, len(m.Metadata)+1)
		maps.Copy(headers, m.Metadata)
		if _, taken := headers[UUIDHeader]; taken {
			return nil, fmt.Errorf("publish to topic %q: message %d: %w: metadata %q is reserved for the UUID", topic, i, weir.ErrInvalid, UUIDHeader)
		}
		headers[UUIDHeader] = m.UUID
		payload := []byte(m.Payload)
		if payload == nil {
			payload = []byte{} // Weir takes nil for an oversight
		}
		out[i] = weir.Message{Headers: headers, Payload: payload}
		if c.MessageKey != nil {
			out[i].Key = c.MessageKey(topic, m)
		}
		if c.Complete != nil {
			c.Complete(topic, m, &out[i])
		}
	}
	return out, nil
}

// toWatermill gives a message as Watermill knows it.
func toWatermill(r *weir.Received[[]byte]) *message.Message {
	uuid, ok := r.Headers[UUIDHeader]
	if !ok {
		uuid = strconv.FormatInt(r.ID, 10)
	}
	m := message.NewMessage(uuid, r.Value)
	for k, v := range r.Headers {
		if k != UUIDHeader {
			m.Metadata[k] = v
		}
	}
	return m
}

// together is the context of a call about all of the messages: it has the values of the first one's and ends with any of them.
func together(messages []*message.Message) (context.Context, context.CancelFunc) {
	first := messages[0].Context()
	ctx, cancel := context.WithCancelCause(first)
	var stops []func() bool
	last := first.Done()
	for _, m := range messages[1:] {
		other := m.Context()
		if done := other.Done(); done != nil && done != last {
			last = done
			stops = append(stops, context.AfterFunc(other, func() { cancel(context.Cause(other)) }))
		}
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}

// topicOptions are o with the format that fits every payload where it says none.
func topicOptions(o weir.TopicOptions) *weir.TopicOptions {
	if o.Format == "" {
		o.Format = weir.Bytes
	}
	return &o
}

func invalid(field string, value any, rule string) error {
	return fmt.Errorf("%w: %s is %v, %s", weir.ErrInvalid, field, value, rule)
}
