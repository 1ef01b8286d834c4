-- Has segments made for so many more messages.
select weir.make_room($1::text, $2::bigint)
